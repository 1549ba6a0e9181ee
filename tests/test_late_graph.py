"""A first start serves in PyTorch; the graph, once it is kept, takes over between two steps."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from oasr_backend.checkpoints import open_checkpoint
from oasr_backend.compiled import SessionEncoder, files
from oasr_backend.config import ServingConfig
from oasr_backend.models.conformer import ConformerEncoder
from oasr_backend.streaming.assemble import assemble, awaits_graph, take_kept_graph
from oasr_backend.streaming.engine import Engine
from oasr_backend.triton_backend.graph_maker import GraphMaker
from tests.conftest import GOLDEN_DIR
from tests.engine_helpers import ask_one, assert_all_is_free, noise, text_alone
from tests.guards import GUARD_S, wait_until


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def first_engine(*, may_export: bool = False, **settings: Any) -> Engine:
    return assemble(
        open_checkpoint(GOLDEN_DIR / "wenet_small").load(),
        ServingConfig.of(max_streams=8, **settings),
        device=torch.device("cpu"),
        may_export=may_export,
    )


def encoder_of(engine: Engine) -> torch.nn.Module:
    return engine.parts.model.encoder


def test_streams_go_on_where_the_graph_takes_over() -> None:
    engine = first_engine(steps_at_once=2)
    assert isinstance(encoder_of(engine), ConformerEncoder)
    assert awaits_graph(engine)
    assert not take_kept_graph(engine), "no graph is kept yet"
    first_S, rest_S = noise(1)[:15_000], noise(1)[15_000:]
    ask_one(engine, "a", first_S, flags="S")
    first_engine(may_export=True)
    assert take_kept_graph(engine)
    assert isinstance(encoder_of(engine), SessionEncoder)
    assert not awaits_graph(engine)
    assert ask_one(engine, "a", rest_S, flags="E").text == text_alone(noise(1))
    assert ask_one(engine, "b", noise(2), flags="SE").text == text_alone(noise(2))
    assert_all_is_free(engine)


def test_the_changeover_waits_for_a_step_that_goes_on() -> None:
    engine, forward = first_engine(), threading.Event()
    first_engine(may_export=True)
    seen = list[torch.nn.Module]()

    def hold(_module: torch.nn.Module, _inputs: tuple[torch.Tensor, ...]) -> None:
        if forward.is_set():
            return
        forward.set()
        changing.start()
        wait_until(lambda: bool(engine._lanes._waiters), what="it waits for the step")
        seen.append(encoder_of(engine))

    changing = threading.Thread(target=take_kept_graph, args=(engine,))
    engine.parts.model.frontend.filterbank.register_forward_pre_hook(hold)
    assert ask_one(engine, "a", noise(1), flags="SE").text == text_alone(noise(1))
    changing.join(GUARD_S)
    assert isinstance(seen[0], ConformerEncoder)
    assert isinstance(encoder_of(engine), SessionEncoder)


@pytest.mark.parametrize("settings", [{"cpu_encoder": "pytorch"}, {"dtype": "bfloat16"}])
def test_who_chose_pytorch_waits_for_no_graph(settings: dict[str, str]) -> None:
    assert not awaits_graph(first_engine(**settings))


def test_an_explicit_choice_is_made_at_once() -> None:
    assert isinstance(encoder_of(first_engine(cpu_encoder="onnx")), SessionEncoder)


def test_a_folder_that_keeps_nothing_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setattr(files, "cache_root", lambda: tmp_path / "file")
    assert not awaits_graph(first_engine()), "a graph would be made in vain at each start"


def test_a_graph_that_cannot_be_made_is_told_and_pytorch_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = first_engine()
    maker = GraphMaker({"model_config": "{}", "model_name": "m", "model_repository": "/"}, engine)
    wait_until(lambda: "event=graph_not_made" in caplog.text, what="the log tells it")
    assert "model_instance_kind" in caplog.text, "the cause is not named"
    maker.stop()
    assert isinstance(encoder_of(engine), ConformerEncoder)
    assert ask_one(engine, "a", noise(1), flags="SE").text == text_alone(noise(1))


def test_an_unload_does_not_wait_for_the_graph(caplog: pytest.LogCaptureFixture) -> None:
    maker = GraphMaker({}, first_engine())
    maker.stop()
    assert maker._process.poll() is not None
    assert "event=graph" not in caplog.text
