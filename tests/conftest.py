"""What all tests share: markers that fixtures imply, a cache of their own.

Without a GPU, Triton kernels run in Triton's own interpreter. It must be told before the kernels are imported.
"""

import logging
import os
from importlib.metadata import version
from pathlib import Path

import pytest
from hypothesis import settings
from logged import LOGGER, logged

if not Path("/dev/nvidiactl").exists():  # torch, which knows better, takes seconds to import
    os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile("busy", deadline=None)  # another process may have the core
settings.load_profile("busy")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Whatever opens the page in a browser is marked as such; families that transformers computes wrongly are skipped."""
    here = tuple(int(number) for number in version("transformers").split(".")[:2])
    for item in items:
        if "browser" in getattr(item, "fixturenames", ()):
            item.add_marker("browser")
        family = item.callspec.params.get("family") if hasattr(item, "callspec") else None
        since = RIGHT_SINCE.get(family) if isinstance(family, str) else None
        if since and here < since:
            item.add_marker(pytest.mark.skip(reason=f"{family} is right since transformers {since[0]}.{since[1]}"))


RIGHT_SINCE = {"umt5": (5, 18), "t5gemma": (5, 21)}
"""Family → the first version of transformers that computes it rightly. Before, the decoder of UMT5 saw later tokens (attach
refuses it), and T5Gemma gave a row other logits alone than in a batch."""


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory):
    """Prepared data of a module's tests lie in a folder of their own, and no hub is asked."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NGRAMLOSS_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield


@pytest.fixture
def messages():
    """What the library logs."""
    with logged() as lines:
        yield lines


@pytest.fixture(autouse=True)
def own_logging():
    """A command of an earlier test, or of a fixture, shows messages; the next test does not."""
    LOGGER.handlers[:], LOGGER.propagate = [logging.NullHandler()], True
    LOGGER.setLevel(logging.NOTSET)


@pytest.fixture(autouse=True)
def own_entries(monkeypatch):
    """What a test adds to the registries is gone after it."""
    from ngramloss import METRICS, OBJECTIVES

    for registry in (OBJECTIVES, METRICS):
        monkeypatch.setattr(registry, "_added", {})


@pytest.fixture(scope="session")
def small_run(tmp_path_factory):
    """The folder of a run, as training leaves it."""
    import tiny_tokenizers
    from searches import real_model

    from ngramloss import recipe

    folder = tmp_path_factory.mktemp("runs") / "mine"
    real_model().save_pretrained(folder / "model")
    tiny_tokenizers.ours().save_pretrained(folder / "model")
    settings = recipe.load(
        "demo", ["data.separator=<s>", "data.splitter=period", "data.prefix=summarize: ", "data.max_source=20"]
    )
    (folder / "recipe.toml").write_text(recipe.dump(settings))
    return folder
