"""names of objectives, metrics and systems → their entries: built in, added by a program, or of installed packages.

To add an entry, write ``ng.OBJECTIVES["mine"] = ng.Objective(...)``, ``ng.METRICS["mine"] = ng.Metric(...)`` or
``ng.SYSTEMS["mine"] = ng.System(...)`` in a program, or in a file for the option ``--plugin FILE``. An installed
package declares its entries as entry points in the groups ``ngramloss.objectives``, ``ngramloss.metrics``,
``ngramloss.systems`` and ``ngramloss.verbs``, and packages with recipes in ``ngramloss.recipes``.
"""

from __future__ import annotations

import ast
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.machinery import ModuleSpec, all_suffixes
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from inspect import getdoc
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from ngramloss.errors import MissingFileError, UserError
from ngramloss.settings import nearest
from ngramloss.storage.files import fingerprint

Entry = TypeVar("Entry")
_LOADING: list[Path] = []  # The plugin files that are being run, the innermost last
_PREFIX = "ngramloss_plugin_"  # Modules of plugin files begin with it
_packages: set[str] = set()  # Installed packages whose entries were imported
REINSTALL = "What comes with ngramloss is listed when it is installed: after an update, install it again with pip."


def installed_points(group: str) -> list[EntryPoint]:
    """The entry points of installed packages in ``ngramloss.GROUP``, those of ngramloss itself last, which wins."""
    return sorted(entry_points(group=f"ngramloss.{group}"), key=_is_ours)


def _is_ours(point: EntryPoint) -> bool:
    return point.dist is not None and point.dist.name == "ngramloss"


class Registry(MutableMapping[str, Entry], Generic[Entry]):
    """Entries by name. Those of installed packages are imported on first use; names of ``builtin`` cannot be reused."""

    def __init__(self, noun: str, kind: type[Entry], builtin: Mapping[str, Entry] | None = None) -> None:
        self.noun, self.kind = noun, kind
        self._builtin = dict(builtin or {})
        self._added: dict[str, Entry] = {}
        self._added_by: dict[str, Path | None] = {}

    @cached_property
    def _installed(self) -> dict[str, EntryPoint]:
        points = {point.name: point for point in installed_points(f"{self.noun}s")}
        return {name: point for name, point in points.items() if name not in self._builtin}

    def _ours(self, name: str) -> bool:
        return name in self._builtin or (name in self._installed and _is_ours(self._installed[name]))

    def __getitem__(self, name: str) -> Entry:
        if name in self._builtin:
            return self._builtin[name]
        if name not in self._added and name in self._installed:
            self._add(name, self._import(self._installed[name]))
        return self._added[name]

    def __setitem__(self, name: str, entry: Entry) -> None:
        if self._ours(name):
            raise UserError(f"ngramloss has its own {self.noun} {name!r}. Choose another name for yours.")
        self._add(name, entry)

    def _add(self, name: str, entry: Entry) -> None:
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            raise UserError(f"{self.noun} {name!r}: use a name of letters, digits and underscores.")
        if not isinstance(entry, self.kind):
            kind, got = self.kind.__name__, type(entry).__name__
            raise UserError(f"the {self.noun} {name!r} must be an ngramloss.{kind}, got {got}.")
        self._added[name] = entry
        self._added_by[name] = _LOADING[-1] if _LOADING else None

    def __delitem__(self, name: str) -> None:
        del self._added[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self._builtin, *self._added, *self._installed]))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __contains__(self, name: object) -> bool:
        return name in self._builtin or name in self._added or name in self._installed

    def __repr__(self) -> str:
        return f"<{self.noun}s: {', '.join(self)}>"

    def entry(self, name: str) -> Entry:
        """The entry of that name. Raises an error that suggests the closest name."""
        if name not in self:
            again, known = "" if self._builtin else f" {REINSTALL}", ", ".join(self) or "none"
            unknown = f"unknown {self.noun} {name!r}. {nearest(name, self)}Choose from {known}"
            raise UserError(f"{unknown}. If it is your own, load its file with --plugin FILE.{again}")
        return self[name]

    def origin(self, name: str) -> str:
        """Where an entry comes from: a package or a plugin; empty if it is ngramloss' own."""
        if self._ours(name):
            return ""
        point = self._installed.get(name)
        return f"package {point.dist.name}" if point is not None and point.dist else "plugin"

    def source(self, name: str) -> str:
        """A hash of the code of an entry and of its own modules that it imports; empty for one of ngramloss."""
        if self._ours(name):
            return ""
        entry, point = self.entry(name), self._installed.get(name)
        home = self._added_by.get(name) if point is None else _module_file(point.module)
        used = [_module_file(module) for function in _functions(entry) for module in _module_names(function)]
        files = own_files([path for path in (home, *used) if path], package=_package(home) if home else None)
        return fingerprint(files) if files else ""

    def problem(self, name: str) -> str:
        """Why an entry of an installed package cannot be used; empty if it can."""
        try:
            self.entry(name)
        except UserError as reason:
            return str(reason)
        return ""

    def _import(self, point: EntryPoint) -> Any:
        package = point.dist.name if point.dist else point.value
        if not _is_ours(point):
            _packages.add(point.module.partition(".")[0])
        try:
            return point.load()
        except Exception as error:  # another package's code may raise anything
            what, why = f"the {self.noun} {point.name!r} of the installed package {package}", type(error).__name__
            raise UserError(f"{what} cannot be imported: {why}: {error}. Fix or uninstall that package.") from error


@dataclass(frozen=True)
class LazyFunction:
    """The function that ``module:name`` refers to, imported when it is first called."""

    path: str

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Import the function and call it."""
        return load_function(self.path)(*args, **options)


def load_function(function: str | Callable[..., Any]) -> Callable[..., Any]:
    """The function itself, or the one that ``module:name`` refers to."""
    if isinstance(function, LazyFunction):
        function = function.path
    if not isinstance(function, str):
        return function
    module, _, name = function.partition(":")
    loaded: Callable[..., Any] = getattr(import_module(module), name)
    return loaded


def first_doc_line(function: Callable[..., Any]) -> str:
    """The first line of a function's docstring; empty if it has none."""
    return (getdoc(function) or "").partition("\n")[0]


def load_file(path: Path) -> None:
    """Run a plugin file, which adds its objectives and metrics."""
    if not path.is_file():
        raise MissingFileError(f"there is no plugin file {path}.")
    name = f"{_PREFIX}{path.stem}_{fingerprint([path])[:8]}"
    spec = spec_from_file_location(name, path) if path.suffix == ".py" else None
    if spec is None or spec.loader is None:
        raise UserError(f"a plugin is a Python file, got {path}.")
    module = module_from_spec(spec)
    sys.modules[name] = module  # so that classes of the file can be pickled
    _LOADING.append(path)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        if isinstance(error, UserError):
            raise
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == path.resolve()]
        at = f" in line {lines[-1]}" if lines else ""
        raise UserError(f"the plugin {path} failed{at}: {type(error).__name__}: {error}") from error
    finally:
        _LOADING.pop()


def call(noun: str, name: str, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call the function of an entry. Raises ``UserError`` if it does not take these arguments."""
    try:
        return function(*args, **options)
    except TypeError as error:
        inside = error.__traceback__ and error.__traceback__.tb_next
        if inside:
            raise
        raise UserError(f"the function of the {noun} {name!r} cannot be called as its entry says: {error}.") from error


class Blame(NamedTuple):
    """The code of a plugin in which an error was raised: its place, and the traceback from there on."""

    place: str
    lines: str


def blame(error: BaseException) -> Blame | None:
    """Whether code of a plugin was running when an error was raised; None if it was not."""
    trace, theirs = error.__traceback__, []
    while trace is not None:
        module = str(trace.tb_frame.f_globals.get("__name__", ""))
        if module.startswith(_PREFIX) or module.partition(".")[0] in _packages:
            theirs.append(trace)
        trace = trace.tb_next
    if not theirs:
        return None
    lines = "".join(traceback.format_exception(type(error), error, theirs[0])).rstrip("\n")
    return Blame(f"the plugin {theirs[-1].tb_frame.f_code.co_filename}, line {theirs[-1].tb_lineno}", lines)


def _functions(entry: Any) -> Iterator[str | Callable[..., Any]]:
    for name in ("function", "notes", "variants", "kernels"):
        value = getattr(entry, name, None)
        yield from value.values() if isinstance(value, Mapping) else [value] if value else []


def _module_names(function: Any) -> Iterator[str]:
    if isinstance(function, LazyFunction):
        function = function.path
    if isinstance(function, str):
        yield function.partition(":")[0]
        return
    while function is not None:
        yield str(getattr(function, "__module__", ""))
        function = getattr(function, "func", None)  # of a partial


def _module_file(name: str) -> Path | None:
    """The file of a module; None if it has none. Nothing is imported but the packages that it is in."""
    file = getattr(sys.modules.get(name), "__file__", None) or getattr(_spec(name), "origin", None)
    return Path(file) if file and Path(file).is_file() else None


def _spec(name: str) -> ModuleSpec | None:
    with suppress(ImportError, ValueError):
        return find_spec(name) if name else None
    return None


def own_files(paths: Sequence[Path], *, package: Path | None = None) -> list[Path]:
    """Python files and the modules of their own that they import, directly or not, in a fixed order.

    Imports are read from the code, so that one in a function counts before it is executed. A module is their own if it
    lies beside the file or is found where Python looks for it, and belongs to no installed package but ``package``.
    """
    found: set[Path] = set()
    left = list(paths)
    while left:
        path = left.pop().resolve()
        if path not in found and _package(path) in (None, package):
            found.add(path)
            left += _imported_files(path)
    return sorted(found)


def _package(path: Path) -> Path | None:
    """The folder of the installed package that a file belongs to, also of ngramloss and Python; None if of none."""
    path = path.resolve()
    for parent in path.parents:
        if parent.name in ("site-packages", "dist-packages"):
            return parent / path.relative_to(parent).parts[0]
    homes = (Path(__file__).parent.resolve(), Path(sysconfig.get_path("stdlib")).resolve())
    return next((home for home in homes if path.is_relative_to(home)), None)


def _imported_files(path: Path) -> Iterator[Path]:
    """The files of the modules that a Python file imports, where it can be said."""
    try:
        tree = ast.parse(path.read_bytes()) if path.suffix == ".py" else ast.Module([], [])
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        for level, name in _imports(node):
            top = name.partition(".")[0]
            folders = [path.parents[level - 1]] if 0 < level <= len(path.parents) else [path.parent]
            if not level and (spec := _spec(top)):
                folders += [Path(place).parent for place in spec.submodule_search_locations or [spec.origin or top]]
            for folder in folders:
                yield from _files_of(folder, name)


def _imports(node: ast.AST) -> Iterator[tuple[int, str]]:
    if isinstance(node, ast.Import):
        yield from ((0, alias.name) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield from ((node.level, ".".join(filter(None, [node.module, alias.name]))) for alias in node.names)
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
        words = [word.value for word in node.args[:1] if isinstance(word, ast.Constant)]
        yield from ((0, word) for word in words if isinstance(word, str))


def _files_of(folder: Path, name: str) -> Iterator[Path]:
    """The files in a folder that importing ``a.b`` may run: those of its packages, and those of ``a`` and ``a.b``."""
    for part in [*name.split("."), ""]:
        places = [folder / "__init__", *([folder / part] if part else [])]
        yield from (file for place in places for end in all_suffixes() if (file := Path(f"{place}{end}")).is_file())
        folder = folder / part
