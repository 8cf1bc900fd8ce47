"""a verb's name → its line in the help, and the function that adds its options; those of packages by entry point."""

from __future__ import annotations

from dataclasses import dataclass

from ngramloss.plugins import Registry


@dataclass(frozen=True)
class Verb:
    """A command of ``ngramloss``.

    Attributes:
        about: its line in the list of commands.
        add: ``module:name`` of a function that adds options to the command's parser, and ``run_verb``, the function
            that runs it. It is imported when the command is given.
        after: the verb that it follows in the list; by default it is the last one.
    """

    about: str
    add: str
    after: str = ""


_BUILTIN = {
    "new": Verb("write a small recipe and data to start from", "ngramloss.cli.new:add"),
    "train": Verb("train a model, or continue a stopped run", "ngramloss.cli.train:add"),
    "generate": Verb("generate summaries or translations of a split", "ngramloss.cli.generate:add"),
    "score": Verb("score texts and compare systems", "ngramloss.cli.score:add"),
    "report": Verb("write an HTML page of results and summaries", "ngramloss.cli.report:add"),
    "explain": Verb("show how an objective scores a sentence pair", "ngramloss.cli.explain:add"),
    "list": Verb("list objectives, metrics, recipes, baselines, engines or systems", "ngramloss.cli.list_:add"),
    "data": Verb("inspect data sets", "ngramloss.cli.data:add"),
    "study": Verb("compare objectives over seeds, data sets and models", "ngramloss.cli.study:add"),
    "reproduce": Verb("reproduce a table of the paper", "ngramloss.cli.reproduce:add"),
    "candidates": Verb("generate and score several outputs for each source", "ngramloss.cli.candidates:add"),
    "publish": Verb("prepare a model and its card for a hub", "ngramloss.cli.publish:add"),
    "docs": Verb("print a page of the guide", "ngramloss.cli.docs:add"),
    "doctor": Verb("show installed packages and the backend", "ngramloss.cli.doctor:add"),
}

VERBS: Registry[Verb] = Registry("verb", Verb, _BUILTIN)
"""All commands by name. An installed package adds its own in the entry point group ``ngramloss.verbs``."""


def in_order() -> list[str]:
    """The names of all verbs, in the order of the help."""
    names = [*_BUILTIN]
    for name in VERBS:
        if name not in names:
            before = "" if VERBS.problem(name) else VERBS[name].after
            names.insert(names.index(before) + 1 if before in names else len(names), name)
    return names
