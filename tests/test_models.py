"""What encoders declare, what heads give, and when a step's states are stored."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from oasr_backend.cache import SlotStates, StreamStateSpec
from oasr_backend.checkpoints import Checkpoint, open_checkpoint
from oasr_backend.decoders.base import CTC_SEARCHES
from oasr_backend.errors import CheckpointError, ConfigError
from oasr_backend.features import KaldiFrontend, LogMelFilterbank
from oasr_backend.models import (
    AcousticModel,
    AttentionSpec,
    CtcHead,
    EncoderCaches,
    EncoderSpec,
    Head,
    LeftChunks,
    ModelOutput,
    StreamingEncoder,
    TrainedWindow,
    check_chunk_size,
)
from oasr_backend.text.tokenizer import UnitTokenizer
from tests.checkpoint_helpers import SOURCE

SPEC = EncoderSpec(model_dim=3, subsampling_rate=1, right_context_frames=0)
CPU = torch.device("cpu")


class RunningSum(StreamingEncoder):
    """The sum of all frames heard, in a declared state; no attention."""

    spec = replace(SPEC, state_specs=(StreamStateSpec("sum", (3,)),))

    def forward_chunk(self, features_BWF: Tensor, caches: EncoderCaches) -> Tensor:
        heard_BTD = features_BWF[..., :3].cumsum(1) + caches.states["sum"].gather()[:, None]
        caches.states["sum"].scatter(heard_BTD[:, -1])
        return heard_BTD


class Doubled(Head):
    """Fails as long as it is told to."""

    name = "doubled"
    fails = False

    def forward(self, encoded_BTD: Tensor) -> Tensor:
        if self.fails:
            raise torch.OutOfMemoryError
        return 2 * encoded_BTD


class Counting(Head):
    """How many frames its stream has had, this step's among them."""

    name = "counting"
    state_specs = (StreamStateSpec("count", (), dtype=torch.int32),)

    def step(self, encoded_BTD: Tensor, caches: EncoderCaches) -> Tensor:
        count_B = caches.states["count"].gather() + caches.num_new_B.int()
        caches.states["count"].scatter(count_B)
        return count_B[:, None].expand(-1, encoded_BTD.shape[1])


def running_sum(*heads: Head) -> AcousticModel:
    frontend = KaldiFrontend(LogMelFilterbank())
    model = AcousticModel(frontend, RunningSum(), heads or [Doubled()])
    model.prepare(device=CPU, dtype=torch.float32, num_positions=1)
    return model


def caches_of(states: SlotStates, slots: list[int]) -> EncoderCaches:
    slots_B = torch.tensor(slots)
    return EncoderCaches(
        kv=[],
        first_key_position_B=torch.zeros_like(slots_B),
        num_new_B=torch.full_like(slots_B, 2),
        states=states.staged_views(slots_B),
    )


def step(model: AcousticModel, features_BWF: Tensor, caches: EncoderCaches) -> ModelOutput:
    """Of windows whose frames are all real."""
    num_rows, num_frames, _ = features_BWF.shape
    return model.forward_features(features_BWF, caches, torch.full((num_rows,), num_frames))


def test_an_encoder_without_attention_keeps_what_it_declares() -> None:
    model = running_sum()
    assert model.spec.attention is None
    states = SlotStates(model.spec.state_specs, 4, CPU)
    ones_BWF = torch.ones(2, 2, 80)
    step(model, ones_BWF, caches_of(states, [3, 1]))
    output = step(model, ones_BWF[:1], caches_of(states, [1]))
    assert output.heads["doubled"][0, :, 0].tolist() == [6.0, 8.0]
    assert states.buffer_of("sum")[:, 0].tolist() == [0.0, 4.0, 0.0, 2.0]


def test_no_state_is_stored_before_every_head_has_run() -> None:
    head = Doubled()
    model = running_sum(head)
    states = SlotStates(model.spec.state_specs, 1, CPU)
    head.fails = True
    with pytest.raises(torch.OutOfMemoryError):
        step(model, torch.ones(1, 2, 80), caches_of(states, [0]))
    assert not states.buffer_of("sum").any()
    head.fails = False
    output = step(model, torch.ones(1, 2, 80), caches_of(states, [0]))
    assert output.encoded_BTD[0, -1].tolist() == [2.0, 2.0, 2.0]


def test_every_head_of_a_model_gives_its_output_by_name() -> None:
    model = running_sum(Doubled(), CtcHead(3, 7, blank_id=2))
    states = SlotStates(model.spec.state_specs, 2, CPU)
    output = step(model, torch.ones(2, 2, 80), caches_of(states, [0, 1]))
    shapes = {name: tuple(head.shape) for name, head in output.heads.items()}
    assert shapes == {"doubled": (2, 2, 3), "ctc": (2, 2, 7)}


def test_a_head_keeps_what_it_declares_beside_the_encoder() -> None:
    model = running_sum(Doubled(), Counting())
    assert [spec.name for spec in model.state_specs] == ["sum", "count"]
    states = SlotStates(model.state_specs, 3, CPU)
    step(model, torch.ones(2, 2, 80), caches_of(states, [2, 1]))
    output = step(model, torch.ones(1, 2, 80), caches_of(states, [1]))
    assert output.heads["counting"].tolist() == [[4, 4]]
    assert states.buffer_of("count").tolist() == [0, 4, 2]


@pytest.mark.parametrize("heads", [[], [Doubled(), Doubled()]])
def test_heads_without_names_of_their_own_are_refused(heads: list[Head]) -> None:
    with pytest.raises(ConfigError, match="each its own name"):
        AcousticModel(KaldiFrontend(LogMelFilterbank()), RunningSum(), heads)


def test_the_parts_of_an_output_are_put_together_row_by_row() -> None:
    whole = ModelOutput(torch.arange(6.0).view(3, 1, 2), {"ctc": torch.arange(9.0).view(3, 1, 3)})
    parts = [whole.first(1), ModelOutput(whole.encoded_BTD[1:], {"ctc": whole.heads["ctc"][1:]})]
    again = ModelOutput.cat(parts)
    assert torch.equal(again.encoded_BTD, whole.encoded_BTD)
    assert torch.equal(again.heads["ctc"], whole.heads["ctc"])
    assert whole.first(2).heads["ctc"].data_ptr() == whole.heads["ctc"].data_ptr()


def test_an_encoder_must_say_what_it_reads_and_does() -> None:
    class Nothing(StreamingEncoder):
        pass

    with pytest.raises(TypeError, match="forward_chunk"):
        Nothing()  # type: ignore[abstract]


def test_a_spec_says_how_far_attention_sees() -> None:
    assert AttentionSpec(2, 4, 16).span == LeftChunks()
    assert AttentionSpec(2, 4, 16, TrainedWindow(70)).span == TrainedWindow(70)
    with pytest.raises(ConfigError, match="window of 0 frames"):
        TrainedWindow(0)
    with pytest.raises(ConfigError, match=r"num_layers=0, below 1.*attention=None"):
        AttentionSpec(0, 4, 16)


def test_a_chunk_size_that_was_not_trained_is_refused_by_name() -> None:
    check_chunk_size(SPEC, 16)
    trained = replace(SPEC, chunk_sizes=(7, 14))
    check_chunk_size(trained, 14)
    with pytest.raises(ConfigError, match=r"chunk_size=16, .*trained with chunks of 7 or 14"):
        check_chunk_size(trained, 16)


def test_a_conformer_declares_its_convolution_as_a_state() -> None:
    model = open_checkpoint(SOURCE).load().model
    assert model.spec.attention == AttentionSpec(num_layers=3, num_kv_heads=4, head_dim=16)
    # Layers, then the frames that a kernel of 15 sees of the past, then the model's width.
    assert model.spec.state_specs == (StreamStateSpec("conv", (3, 14, 64), slot_axis=1),)


def test_position_tables_are_no_weights() -> None:
    names = open_checkpoint(SOURCE).load().model.state_dict()
    assert not [name for name in names if "position_PHC" in name or "position_bias_PH" in name]


def test_a_search_that_reads_a_head_which_is_not_there_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"'greedy' reads the head 'ctc'.*has doubled"):
        Checkpoint(running_sum(), UnitTokenizer(["<blank>", "a"]), CTC_SEARCHES)


def test_outputs_without_a_unit_are_refused_with_both_numbers() -> None:
    model = running_sum(CtcHead(3, 7, blank_id=0))
    with pytest.raises(CheckpointError, match="2 units, but the CTC head has 7 outputs"):
        Checkpoint(model, UnitTokenizer(["<blank>", "a"]), CTC_SEARCHES)


def test_weights_are_prepared_in_the_type_that_they_are_served_in() -> None:
    model = running_sum(CtcHead(3, 7, blank_id=0))
    model.prepare(device=CPU, dtype=torch.bfloat16, num_positions=1)
    states = SlotStates(model.spec.state_specs, 1, CPU, dtype=torch.bfloat16)
    output = step(model, torch.ones(1, 2, 80), caches_of(states, [0]))
    assert output.heads["ctc"].dtype == torch.bfloat16
    assert {buffer.dtype for buffer in nn.Module.buffers(model.frontend)} == {torch.float32}
