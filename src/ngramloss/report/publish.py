"""a finished run → a folder ready for a hub: weights, tokenizer, settings, and a card with data and scores."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from ngramloss import recipe
from ngramloss.data.data_sets import BUILT_IN, Files, Hub, missing, origin
from ngramloss.data.prompts import prompt_of, template_of
from ngramloss.data.token_ids import special_tokens
from ngramloss.errors import MissingFileError, UserError
from ngramloss.metrics.registry import METRICS, scores_of
from ngramloss.models.adapters import ADAPTER
from ngramloss.output import escape
from ngramloss.output.console import logger
from ngramloss.output.escape import as_code, in_markdown, in_python, without_html
from ngramloss.recipe import CHAT, NO_SOURCE, SOURCE, Recipe
from ngramloss.scoring import provenance, score_cache
from ngramloss.scoring.scored_texts import align
from ngramloss.storage.files import fingerprint, inside, read_object, whole_folder
from ngramloss.storage.run_folder import READ, RunFolder, weight_files

CARD = "README.md"  # The name under which a hub shows the card
OWNER = "YOUR-NAME"  # Stands for the owner of the repository until one is given
PIPELINES = {"summarisation": "summarization", "translation": "translation"}
"""Task → what the hub calls it. Decoder-only models are text-generation."""
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_LANGUAGE = re.compile(r"[a-z]{2,3}(?=$|[_-])")


ScoreRow = tuple[str, str, str, float | None, float | None, float | None]
"""Metric, its signature, score, its value, and the ends of its interval."""


class Evaluation(NamedTuple):
    """What wrote a run's own texts, and all their scores."""

    run: provenance.Provenance
    scores: list[ScoreRow]


def publish(folder: Path, out: Path, *, repo: str = "", license: str = "") -> str:
    """Write the folder of a run's model as a hub takes it, to a new folder ``out``. Returns the name on the hub."""
    run = RunFolder(folder)
    settings = _finished(run)
    repo = _checked(repo or f"{OWNER}/{re.sub(r'[^A-Za-z0-9_.]+', '-', folder.resolve().name).strip('-.')}")
    if out.exists():
        raise UserError(f"{out} exists already. Delete it, or choose another folder with -o.")
    config = read_object(inside(run.path, run.model.name, "config.json"))
    with run.lock(option="run"), whole_folder(out) as partial:
        _copy_model(run, partial)
        evaluation = _evaluation(run)
        (partial / run.recipe.name).write_bytes(run.recipe.read_bytes())
        if run.log.is_file():
            (partial / run.log.name).write_bytes(run.log.read_bytes())
        text = _card(settings, run, config, evaluation, repo=repo, license=license)
        (partial / CARD).write_text(text, encoding="utf-8")
    named = {key: value for key, value in recipe.flat(settings) if key in recipe.affecting("place")}
    found = [f"{key} = {value}" for key, value in named.items() if re.search(r"(^|[=,])(/|~|[A-Za-z]:\\)", value)]
    if found:
        named_here = f"{CARD} and recipe.toml name folders of this machine ({'; '.join(found)})"
        logger.warning(f"warning: {named_here}. Change them there if they should stay private.")
    return repo


def _finished(run: RunFolder) -> Recipe:
    """The recipe of a finished run. Raises if there is none, or if only ngramloss can load its model."""
    if not run.path.exists():
        raise MissingFileError(missing(run.path))
    if not run.recipe.is_file():
        why = f"{run.path} is not a run's folder: it has no {run.recipe.name}"
        raise MissingFileError(f"{why}. Give one that `ngramloss train` wrote.")
    settings = recipe.load(str(run.recipe), objective=False)
    if settings.system:
        what = f"{run.path} is a run of {settings.system}, whose model only ngramloss loads"
        raise UserError(f"{what}. `ngramloss publish` writes models that transformers loads.")
    if not run.finished or not run.card.is_file():
        part = run.card if run.finished else run.model
        why = f"{run.path} has no {part.name}: its training is not finished, or the file was deleted"
        raise UserError(f"{why}. Run the same `ngramloss train` command again.")
    return settings


def _checked(repo: str) -> str:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as reason:
        raise UserError(f"--repo takes OWNER/NAME, got {repo!r}: {reason}") from None
    if repo.count("/") != 1:
        raise UserError(f"--repo takes OWNER/NAME, got {repo!r}.")
    return repo


def _copy_model(run: RunFolder, to: Path) -> None:
    """Copy what loading reads, and nothing else: no pickles, no links. Raises if these are not the trained weights."""
    left_out = []
    for path in sorted(run.model.rglob("*")):
        name = path.relative_to(run.model)
        if path.is_dir() and not path.is_symlink():
            continue
        if path.is_symlink() or path.suffix not in (*READ, ".safetensors"):
            left_out += [str(name)] if name.parts != (ADAPTER, CARD) else []  # PEFT's card is a form to fill in
            continue
        (to / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(path, to / name)
    weights = weight_files(to)
    if not weights or not all(path.suffix == ".safetensors" for path in weights):
        raise UserError(f"{run.model} has no safetensors. Only these are published: they cannot run code.")
    trained = read_object(run.weights).get("fingerprint") if run.weights.is_file() else None
    if trained is not None and fingerprint(weights) != trained:
        why = f"the weights in {run.model} were changed after training, so the run's card does not describe them"
        raise UserError(f"{why}. Train again, or upload that folder with a card of its own.")
    if left_out:
        logger.warning(f"warning: not published, because no model is loaded from them: {', '.join(left_out)}.")


def _evaluation(run: RunFolder) -> Evaluation | None:
    """The saved scores of texts that this model wrote; None, and a message, if there are none."""
    reason = ""
    if not run.predictions.is_file():
        reason = f"no texts were generated yet: ngramloss generate {run.path}, then ngramloss score {run.path}"
    elif not run.wrote_predictions:
        reason = f"another model wrote the texts in {run.path}"
    else:
        run.raise_unless_current()
        texts = align(None, [run.path])
        saved = score_cache.read(run.path, texts.task.ids, texts.texts[0])
        hashes = score_cache.text_hashes(texts.task._asdict())
        own = {metric: keyed for metric, keyed in saved.metrics.items() if keyed.reads(hashes)}
        if others := [metric for metric in saved.metrics if metric not in own]:
            why = (
                f"{', '.join(others)} of {run.path} was computed with other references or documents than the run's own"
            )
            logger.warning(f"warning: {why}, and is left out of the card. Score it again: ngramloss score {run.path}")
        scores = []
        for metric, keyed in own.items():
            signature = keyed.scores.signature + (f"|ngramloss:{keyed.version}" if keyed.version else "")
            scores += [(metric, signature, name, *saved.corpus[name]) for name in keyed.scores.values]
        if scores:
            return Evaluation(provenance.run(run.path), scores)
        reason = saved.damage or f"the texts have no scores yet: ngramloss score {run.path}"
    logger.warning(f"warning: the card has no scores, because {reason}.")
    return None


def _card(
    settings: Recipe, run: RunFolder, config: dict[str, Any], evaluation: Evaluation | None, *, repo: str, license: str
) -> str:
    """The run's own card with metadata before it, and the scores and how to use the model before its first section."""
    from huggingface_hub import ModelCard, ModelCardData

    is_causal = not config.get("is_encoder_decoder")
    base = settings.model.encoder or settings.model.name
    trained_on = _origin(settings.data.name)
    languages = [settings.data.source_language, settings.data.target_language, settings.data.language]
    pipeline = "text-generation" if is_causal else PIPELINES[settings.task]
    results = _results(evaluation, pipeline) if evaluation else []
    data = ModelCardData(
        language=sorted({found[0] for code in languages if (found := _LANGUAGE.match(code))} - {"auto"}) or None,
        license=license or None,
        library_name="transformers",
        pipeline_tag=pipeline,
        base_model=base if base != "scratch" and _HUB_NAME.fullmatch(base) and not Path(base).exists() else None,
        datasets=[trained_on.id] if isinstance(trained_on, Hub) else None,
        metrics=list(dict.fromkeys(result.metric_type for result in results)) or None,
        tags=["ngramloss"],
        model_name=repo.partition("/")[2],
        eval_results=results or None,
    )
    written = without_html(run.card.read_text(encoding="utf-8"))
    about, section, rest = written.partition("\n## ")
    about = f"# {in_markdown(repo.partition('/')[2])}\n" + about.partition("\n")[2]
    use = _use(settings, run, repo, is_causal=is_causal)
    body = [about.rstrip(), _scores(evaluation), use, section.lstrip() + rest]
    text = f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(part for part in body if part)
    assert ModelCard(text).data.to_yaml() == data.to_yaml(), "the hub reads the card as it was written"
    return text


def _results(evaluation: Evaluation, pipeline: str) -> list[Any]:
    """The scores as the hub's ``model-index`` has them; without those that only describe texts, such as lengths."""
    from huggingface_hub import EvalResult

    about = evaluation.run.generation
    tested_on, name = _origin(str(about.get("data", ""))), escape.name(_data_name(about))
    return [
        EvalResult(
            task_type=pipeline,
            dataset_type=tested_on.id if isinstance(tested_on, Hub) else name,
            dataset_name=name,
            dataset_config=tested_on.config if isinstance(tested_on, Hub) else None,
            dataset_split=escape.name(str(about.get("split", ""))),
            metric_type=metric,
            metric_name=score,
            metric_value=round(value, 4),
            metric_args={"signature": signature}
            | ({"interval_95": [round(low, 4), round(high, 4)]} if low is not None and high is not None else {}),
        )
        for metric, signature, score, value, low, high in evaluation.scores
        # A score of a plugin that is not loaded is taken to be one that judges.
        if value is not None
        and not (metric in METRICS and score in (known := scores_of(metric)) and known[score].better == "neither")
    ]


def _scores(evaluation: Evaluation | None) -> str:
    if evaluation is None:
        return ""
    about = evaluation.run.generation
    rows = []
    for _, _, name, value, low, high in evaluation.scores:
        interval = f"{low:.2f} to {high:.2f}" if low is not None and high is not None else "not known"
        rows.append(f"| {in_markdown(name)} | {'none' if value is None else f'{value:.2f}'} | {interval} |")
    signatures = dict.fromkeys(signature for _, signature, *_ in evaluation.scores)
    listed = [f"* {as_code(signature)}" for signature in [*signatures, provenance.written_by(evaluation.run)]]
    scored = f"On {in_markdown(str(about.get('documents')))} documents, split {as_code(str(about.get('split')))} of "
    scored += f"{as_code(_data_name(about))}. Intervals are over documents, by bootstrap."
    table = ["| score | value | 95% interval |", "|---|---|---|", *rows]
    return "\n".join(["## Scores", "", scored, "", *table, "", "What these values depend on:", "", *listed])


def _origin(name: str) -> Any:
    try:
        return origin(name)
    except UserError:
        return None


def _data_name(about: dict[str, Any]) -> str:
    """The name of the data that were scored, without the folders of this machine."""
    name, split = str(about.get("data", "")), str(about.get("split", ""))
    found = _origin(name)
    if isinstance(found, Hub) or name == BUILT_IN:
        return name
    paths = found.splits.get(split, []) if isinstance(found, Files) else []
    return " + ".join(path.name for path in paths) or Path(name).name


def _use(settings: Recipe, run: RunFolder, repo: str, *, is_causal: bool) -> str:
    lines = _causal_lines(settings, run) if is_causal else _seq2seq_lines(settings)
    kind, notes = "AutoModelForCausalLM" if is_causal else "AutoModelForSeq2SeqLM", []
    if not is_causal and settings.data.separator != "none":
        token = "the tokenizer's separator" if settings.data.separator == "auto" else as_code(settings.data.separator)
        notes.append(f"In training, {token} stood before every sentence of a source; this program leaves it out.")
    if (run.model / ADAPTER).is_dir():
        notes.append(f"The weights have the LoRA adapter merged into them; the adapter alone is in `{ADAPTER}/`.")
    if any(run.model.glob("*.py")):
        notes.append("The model has code of its own, which runs only with `trust_remote_code=True`: read it first.")
        if any("apply_chat_template" in line for line in lines):
            notes += ["This program leaves out what the chat template may write before an answer, as an empty thought."]
    program = [
        f"from transformers import {kind}, AutoTokenizer",
        "",
        f"tokenizer = AutoTokenizer.from_pretrained({in_python(repo)})",
        f"model = {kind}.from_pretrained({in_python(repo)})",
        *lines,
    ]
    return "\n".join(["## Use", "", "```python", *program, "```", *(line for note in notes for line in ("", note))])


def _seq2seq_lines(settings: Recipe) -> list[str]:
    data = settings.data
    prefix = f"{in_python(data.prefix)} + " if data.prefix else ""
    return [
        *([f"tokenizer.src_lang = {in_python(data.source_language)}"] if data.source_language else []),
        'source = "The text that the model reads."',
        f'batch = tokenizer({prefix}source, truncation=True, max_length={data.max_source}, return_tensors="pt")',
        "print(tokenizer.decode(model.generate(**batch)[0], skip_special_tokens=True).strip())",
    ]


def _tokenised(tokenizer: Any) -> list[str]:
    """The lines that turn a prompt into ids, without a token behind it that some tokenizers add by themselves."""
    plain = ['batch = tokenizer(prompt, return_tensors="pt")']
    if tokenizer is None:
        return plain
    first, after = special_tokens(tokenizer)
    if not after:
        return plain
    start = f"{in_python(tokenizer.decode(first))} + " if first else ""
    return [f'batch = tokenizer({start}prompt, add_special_tokens=False, return_tensors="pt")']


def _causal_lines(settings: Recipe, run: RunFolder) -> list[str]:
    from transformers import AutoTokenizer

    data = settings.data
    tokenizer: Any = None
    if not any(run.model.glob("*.py")):  # code of the model's own does not run here
        tokenizer = AutoTokenizer.from_pretrained(run.model, trust_remote_code=False)
    written = f"written = model.generate(**batch, max_new_tokens={settings.generation.max_length})"
    column = str(read_object(run.prepared).get("column", "")) if run.prepared.is_file() else ""
    if data.prompt == CHAT or column == "messages":
        asked = f"{in_python(data.instruction + chr(10) * 2)} + " if data.instruction else ""
        lead = tokenizer and prompt_of(data, settings.task, column, tokenizer, [tokenizer.eos_token_id]).lead
        begun = f" + {in_python(lead)}" if lead else ""
        template = "tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)"
        batch = 'batch = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")'
        prompt = [f'messages = [{{"role": "user", "content": {asked}source}}]', f"prompt = {template}{begun}", batch]
    elif data.prompt == NO_SOURCE:
        return [
            "start = tokenizer.bos_token or tokenizer.eos_token",
            'batch = tokenizer(start, add_special_tokens=False, return_tensors="pt")',
            written,
            "print(tokenizer.decode(written[0], skip_special_tokens=True).strip())",
        ]
    else:
        before, after = template_of(data, settings.task, column).split(SOURCE)
        parts = [in_python(text) for text in (before, after)]
        asked = f"{f'{parts[0]} + ' if before else ''}source{f' + {parts[1]}' if after else ''}"
        prompt = [f"prompt = {asked}", *_tokenised(tokenizer)]
    return [
        'source = "The text that the model reads."',
        *prompt,
        written,
        'print(tokenizer.decode(written[0, batch["input_ids"].shape[1] :], skip_special_tokens=True).strip())',
    ]
