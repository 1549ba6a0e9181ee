"""The shipped config.pbtxt, read as Triton reads it, against the code that relies on it."""

from __future__ import annotations

import re
from typing import Any

import pytest
from google.protobuf import text_format  # type: ignore[import-untyped]
from tritonclient.grpc import model_config_pb2

from oasr_backend.config import ServingConfig
from oasr_backend.options import StreamOptions
from tests.conftest import MODEL_REPOSITORY, ROOT

MODEL_DIR = MODEL_REPOSITORY / "oasr_streaming"


@pytest.fixture(scope="module", name="config")
def _config() -> Any:
    text = (MODEL_DIR / "config.pbtxt").read_text(encoding="utf-8")
    return text_format.Parse(text, model_config_pb2.ModelConfig())


def _tensors(entries: Any) -> dict[str, tuple[int, tuple[int, ...]]]:
    return {entry.name: (entry.data_type, tuple(entry.dims)) for entry in entries}


def test_the_tensors_are_those_of_the_contract(config: Any) -> None:
    pb = model_config_pb2
    assert _tensors(config.input) == {
        "WAV": (pb.TYPE_FP32, (-1,)),
        "WAV_LENS": (pb.TYPE_INT32, (1,)),
        "PCM16": (pb.TYPE_INT16, (-1,)),
    }
    assert _tensors(config.output) == {
        "TRANSCRIPTS": (pb.TYPE_STRING, (1,)),
        "RESULT": (pb.TYPE_STRING, (1,)),
    }


def test_every_input_may_be_left_out_and_audio_is_ragged(config: Any) -> None:
    assert all(entry.optional for entry in config.input)
    ragged = {entry.name for entry in config.input if entry.allow_ragged_batch}
    assert ragged == {"WAV", "PCM16"}


def test_the_wire_module_names_the_same_tensors(config: Any) -> None:
    source = (ROOT / "oasr_backend" / "triton_backend" / "io.py").read_text(encoding="utf-8")
    named = set(re.findall(r'"(WAV|WAV_LENS|PCM16|TRANSCRIPTS|RESULT)"', source))
    assert named == {entry.name for entry in [*config.input, *config.output]}


def test_refused_starts_do_not_fill_the_places_of_the_sequence_batcher(config: Any) -> None:
    """Triton keeps one for each until its idle limit, and memory for each from the start."""
    batching = config.sequence_batching
    idle_s = batching.max_sequence_idle_microseconds / 1e6
    assert batching.oldest.max_candidate_sequences / idle_s > 1000


def test_sequences_go_by_the_oldest_strategy_without_controls(config: Any) -> None:
    batching = config.sequence_batching
    assert batching.WhichOneof("strategy_choice") == "oldest"
    assert not batching.control_input, "a declared CORRID pins ids to one type"
    assert not batching.state, "state is the backend's own"
    assert batching.oldest.max_queue_delay_microseconds == 0, "a caller waits for nobody's company"
    assert not config.model_transaction_policy.decoupled


@pytest.mark.parametrize("on_gpu", [False, True])
def test_triton_admits_more_sequences_than_the_backend(config: Any, on_gpu: bool) -> None:
    serving = _serving(config).with_defaults(on_gpu=on_gpu)
    assert config.sequence_batching.oldest.max_candidate_sequences > serving.step.max_streams
    assert config.max_batch_size >= serving.step.max_step_streams


def test_triton_forgets_a_silent_stream_before_the_backend_does(config: Any) -> None:
    idle_s = config.sequence_batching.max_sequence_idle_microseconds / 1e6
    assert 60 <= idle_s < _serving(config).server.stream_idle_timeout_s


def test_every_parameter_is_one_that_the_backend_knows(config: Any) -> None:
    serving = _serving(config)
    assert (serving.cache.num_left_chunks, serving.cache.chunk_size) == (4, 16)
    assert serving.model.resolve_checkpoint(MODEL_DIR).is_dir(), "the demo checkpoint ships"


def test_streams_get_the_documented_defaults(config: Any) -> None:
    assert _serving(config).defaults == StreamOptions(), "the search is the checkpoint's choice"
    assert _serving(config).model.language == "en", "what the demo checkpoint speaks"


def test_there_is_one_instance_a_device(config: Any) -> None:
    (group,) = config.instance_group
    assert group.count == 1


def test_the_folder_names_the_model(config: Any) -> None:
    assert config.backend == "python"
    assert not config.name, "a name would forbid renaming the folder"
    assert (MODEL_DIR / "1" / "model.py").is_file()


def test_model_py_is_a_thin_shell() -> None:
    lines = (MODEL_DIR / "1" / "model.py").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 60


def test_the_file_is_used_as_it_ships_without_placeholders() -> None:
    text = (MODEL_DIR / "config.pbtxt").read_text(encoding="utf-8")
    assert not re.search(r"\$\{|\$\$|@@|<[a-z_]+>", text)


def _serving(config: Any) -> ServingConfig:
    parameters = {name: value.string_value for name, value in config.parameters.items()}
    return ServingConfig.from_parameters(parameters)
