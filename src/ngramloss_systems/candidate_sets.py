"""files of candidates, of any writer → the examples that they belong to, the texts, and the score of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ngramloss as ng

OF_THE_DATA = tuple(name for name in ng.recipe.affecting("documents", section="data") if name != "name")
"""Settings that say which documents there are, taken from the run that wrote the candidates."""


class CandidateSet(NamedTuple):
    """Examples with candidates. ``data`` and ``split`` are of the first file, ``origins`` of each example."""

    data: ng.recipe.Data
    split: str
    examples: list[ng.data.Example]
    candidates: ng.candidates.Candidates
    fingerprint: str
    origins: list[tuple[str, str]]
    metric: Mapping[str, Any]

    @property
    def texts(self) -> list[tuple[str, ...]]:
        """The candidates of each example."""
        return [self.candidates.rows[example.id][0] for example in self.examples]

    @property
    def scores(self) -> list[tuple[float, ...]]:
        """The scores of each example's candidates."""
        return [self.candidates.rows[example.id][1] for example in self.examples]


def read_set(
    paths: Sequence[Path], data: ng.recipe.Data, task: str, split: str, *, exactly: bool = False
) -> CandidateSet:
    """Read candidates of several writers, with scores of the task's usual metric if they lack them, and examples."""
    parts = [_read(path, data, task, split, exactly=exactly) for path in paths]
    rows: dict[str, Any] = {}
    metric = one_metric({str(path): part.metric for path, part in zip(paths, parts, strict=True)})
    for part, path in zip(parts, paths, strict=True):
        if twice := rows.keys() & part.candidates.rows.keys():
            raise ng.UserError(
                f"{len(twice):,} of the ids in {path} have candidates in an earlier file, too, such as "
                f"{min(twice)!r}. Give each source's candidates once."
            )
        rows |= part.candidates.rows
    examples = [example for part in parts for example in part.examples]
    candidates = ng.candidates.Candidates(rows, ng.candidates.candidates_fingerprint(rows))
    origins = [origin for part in parts for origin in part.origins]
    return CandidateSet(
        parts[0].data, parts[0].split, examples, candidates, ng.data.fingerprint(examples), origins, metric
    )


def one_metric(metrics: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """The metric that scores of several origins have in common; empty if none of them names it."""
    known = {where: metric for where, metric in metrics.items() if metric}
    for where, metric in known.items():
        first, theirs = next(iter(known.items()))
        if metric != theirs:
            raise ng.UserError(
                f"scores of one training need one metric, but {first} have {metric_text(theirs)} and {where} have "
                f"{metric_text(metric)}. Make one of them again, with the same ngramloss candidates --metric."
            )
    return next(iter(known.values()), {})


def metric_text(metric: Mapping[str, Any]) -> str:
    """A saved metric in words.

    >>> metric_text({"name": "chrf", "scores": ["chrf"], "options": {"word_order": "2"}})
    'chrf (word_order=2)'
    """
    if not metric:
        return "a metric that is not named"
    scores = [] if list(metric["scores"]) == [metric["name"]] else [" + ".join(metric["scores"])]
    options = [f"{name}={value}" for name, value in metric.get("options", {}).items()]
    lines = ["a sentence a line"] if metric.get("sentence_a_line") else []
    details = ", ".join([*scores, *options, *lines])
    return f"{metric['name']} ({details})" if details else str(metric["name"])


def check_training(files: Mapping[str, Sequence[Path]]) -> None:
    """Raise if candidates to train or validate on are of the test split."""
    for use, paths in files.items():
        for path in paths:
            if ng.candidates.about_of(path).get("split") == "test":
                raise ng.UserError(
                    f"the {use} candidates in {path} are for the split 'test', on which a reranker is evaluated. Make "
                    f"others with: ngramloss candidates RUN_OR_MODEL --split {use}"
                )


def check_apart(sets: Mapping[str, CandidateSet]) -> None:
    """Raise if sources to validate on are also sources to train on: of the same data and split, with the same id."""
    if len(sets) < 2:
        return
    train, validation = (_keys(sets[split]) for split in ("train", "validation"))
    if shared := train & validation:
        data, split, key = min(shared)
        raise ng.UserError(
            f"{len(shared):,} of {len(validation):,} validation sources are training sources, too, such as {key!r} of "
            f"{data} ({split}). Validate on others: ngramloss candidates RUN_OR_MODEL --split validation"
        )


def _keys(of_split: CandidateSet) -> set[tuple[str, str, str]]:
    whole = {name: _whole(name) for name, _ in set(of_split.origins)}
    return {
        (whole[name], split, example.id)
        for (name, split), example in zip(of_split.origins, of_split.examples, strict=True)
    }


def check_asked(paths: Sequence[Path], data: ng.recipe.Data, split: str | None, asked: Sequence[str]) -> str:
    """The split, after a check of what was asked for against what candidates say of themselves."""
    origins = {}
    for path in paths:
        about = ng.candidates.about_of(path)
        theirs, own = _data_of(about, data), str(about.get("split", split or "test"))
        for key in asked:
            one, other = getattr(data, key), getattr(theirs, key)
            if (_whole(one) != _whole(other)) if key == "name" else (one != other):
                raise ng.UserError(
                    f"the candidates in {path} have data.{key} = {other!r}, but {one!r} was asked for. Leave it out, "
                    "or give other candidates."
                )
        if split and own != split:
            raise ng.UserError(
                f"the candidates in {path} are for the split {own!r}, but {split!r} was asked for. Leave --split out, "
                "or give other candidates."
            )
        origins[_whole(theirs.name), own] = path
    if len(origins) > 1:
        listed = ", ".join(f"{path} of {name} ({of_split})" for (name, of_split), path in origins.items())
        raise ng.UserError(f"expected candidates of one data set and one split, got {listed}. Rerank one at a time.")
    return next(of_split for _, of_split in origins)


def task_of(paths: Sequence[Path]) -> str:
    """The task of candidates: the one that they name, or their writer's run does; empty if none does."""
    found = {}
    for path in paths:
        about = ng.candidates.about_of(path)
        if "task" in about:
            found[str(about["task"])] = path
        elif writer := _writer_recipe(about):
            found[writer.task] = path
    if len(found) > 1:
        listed = ", ".join(f"{task} ({path})" for task, path in found.items())
        raise ng.UserError(f"expected candidates of one task, got {listed}. Give candidates of one task.")
    return next(iter(found), "")


def _whole(name: str) -> str:
    """The name of data, of all its spellings one; of a file or folder the whole path."""
    path = Path(name).expanduser()
    return str(path.resolve()) if path.exists() else ng.data.canonical(name)


def _read(path: Path, data: ng.recipe.Data, task: str, split: str, *, exactly: bool) -> CandidateSet:
    found, about = ng.candidates.read_candidates(path, need_scores=False), ng.candidates.about_of(path)
    if not exactly:
        data, split = _data_of(about, data), str(about.get("split", split))
    whole = ng.data.load_split(data, task, split)
    doubt = ng.candidates.check_candidates(found, about, whole.examples, path=path, split=split)
    for note in filter(None, (doubt, ng.candidates.note_on_training(found, whole.examples, path=path))):
        ng.console.logger.info(note)
    examples = [example for example in whole.examples if example.id in found.rows]
    if not examples:
        raise ng.UserError(
            f"no candidate in {path} has a source and a reference: {data.name} ({split}) has ids like "
            f"{whole.examples[0].id!r}, the candidates have ids like {next(iter(found.rows))!r}. Name the candidates' "
            "data with --data and --split, or set data.id to the column with the ids."
        )
    if lacking := len(found.rows) - len(examples):
        ng.console.logger.warning(
            f"{lacking:,} of {len(found.rows):,} rows of candidates in {path} are left out: {data.name} ({split}) has "
            "no source and no reference with their ids."
        )
    rows = {example.id: found.rows[example.id] for example in examples}
    metric = about.get("metric", {})
    if without := [example for example in examples if not rows[example.id][1]]:
        ng.console.logger.info(
            f"computing the scores of candidates in {path}, which has none of {len(without):,} sources."
        )
        usual = ng.candidate_scores.candidate_metric(ng.candidate_scores.BY_TASK[task], {})
        scores = ng.candidate_scores.score_candidates(usual, without, [rows[example.id][0] for example in without])
        if metric or len(without) == len(rows):
            metric = one_metric({f"rows in {path}": metric, "rows without scores": usual.settings})
        rows |= {
            example.id: (rows[example.id][0], tuple(values)) for example, values in zip(without, scores, strict=True)
        }
    own = ng.candidates.Candidates(rows, ng.candidates.candidates_fingerprint(rows))
    return CandidateSet(data, split, examples, own, whole.fingerprint, [(data.name, split)] * len(examples), metric)


def _data_of(about: Mapping[str, Any], data: ng.recipe.Data) -> ng.recipe.Data:
    """The data of candidates: those that they name, read as their writer's run reads them."""
    if "data" not in about:
        return data
    name, writer = str(about["data"]), _writer_recipe(about)
    if writer and writer.data.name == name:
        data = dataclasses.replace(data, **{key: getattr(writer.data, key) for key in OF_THE_DATA})
    return dataclasses.replace(data, name=name)


def _writer_recipe(about: Mapping[str, Any]) -> ng.recipe.Recipe | None:
    file = ng.RunFolder(Path(str(about["model"]))).recipe if "model" in about else None
    return ng.recipe.load(str(file), objective=False) if file and file.is_file() else None
