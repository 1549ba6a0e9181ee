"""A frame's length, shift and rate come from the front end, and everything else follows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from oasr_backend.errors import ConfigError
from oasr_backend.features import (
    AudioBuffer,
    FbankConfig,
    FeaturePadding,
    FrameGeometry,
    Frontend,
    GlobalCmvn,
    KaldiFrontend,
    LogMelFilterbank,
    WindowFrames,
    WindowGeometry,
)
from oasr_backend.models import (
    AcousticModel,
    ChunkSettings,
    CtcHead,
    EncoderCaches,
    EncoderSpec,
    StreamingEncoder,
)

FRAMES = FrameGeometry(8000, frame_length_samples=90, frame_shift_samples=30, num_bins=2)


class Loudness(Frontend):
    """Two features a frame, of another rate, length and shift than Kaldi's usual ones."""

    def __init__(self) -> None:
        super().__init__(FRAMES)

    def features(self, samples_BS: Tensor) -> Tensor:
        frames_BWN = samples_BS.unfold(1, FRAMES.frame_length_samples, FRAMES.frame_shift_samples)
        return torch.stack((frames_BWN.abs().mean(-1), frames_BWN.std(-1)), dim=-1)

    def normalise(self, features_BWF: Tensor) -> Tensor:
        return 10.0 * features_BWF


class Triples(StreamingEncoder):
    """Three feature frames make one encoder frame; two more on the right are seen."""

    spec = EncoderSpec(model_dim=4, subsampling_rate=3, right_context_frames=2)

    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.Conv1d(2, 4, kernel_size=3, stride=3)

    def forward_chunk(
        self,
        features_BWF: Tensor,
        caches: EncoderCaches,  # noqa: ARG002
    ) -> Tensor:
        encoded_BDT: Tensor = self.stack(features_BWF.transpose(1, 2))
        return encoded_BDT.transpose(1, 2)


def no_caches(num_rows: int, num_frames: int) -> EncoderCaches:
    return EncoderCaches(
        kv=[],
        first_key_position_B=torch.zeros(num_rows, dtype=torch.int64),
        num_new_B=torch.full((num_rows,), num_frames),
    )


def model() -> AcousticModel:
    torch.manual_seed(0)
    return AcousticModel(Loudness(), Triples(), [CtcHead(4, 5, blank_id=0)])


@pytest.mark.parametrize("chunk_size", [1, 4, 7])
def test_windows_of_another_front_end_give_whole_chunks(chunk_size: int) -> None:
    chunked = model()
    chunked.set_chunks(ChunkSettings(chunk_size, num_left_chunks=1))
    geometry = chunked.window_geometry()
    assert geometry.frames == FRAMES
    assert geometry.encoder_frame_s == pytest.approx(3 * 30 / 8000)
    assert geometry.window_samples == 90 + (3 * chunk_size - 1) * 30
    samples_S = np.random.default_rng(0).standard_normal(4000).astype(np.float32)
    buffer = AudioBuffer(geometry)
    buffer.accept(samples_S)
    windows = []
    for _ in range(buffer.num_ready_windows):
        windows.append(np.empty(geometry.window_samples, np.float32))
        num_frames = geometry.window_frames
        assert buffer.pop_window(windows[-1]) == WindowFrames(num_frames, num_frames)
    assert len(windows) > 1
    windows_BS = torch.from_numpy(np.stack(windows))
    num_real_B = torch.full((len(windows),), geometry.window_frames)
    output = model().forward_audio(windows_BS, no_caches(len(windows), chunk_size), num_real_B)
    assert output.encoded_BTD.shape == (len(windows), chunk_size, 4)
    # The windows' frames are the whole signal's, one after the other.
    samples_1S = torch.from_numpy(samples_S)[None]
    whole = model().forward_audio(samples_1S, no_caches(1, chunk_size), num_real_B[:1])
    whole_TV = whole.heads["ctc"][0]
    cut_TV = output.heads["ctc"].flatten(0, 1)
    torch.testing.assert_close(cut_TV, whole_TV[: len(cut_TV)])


def test_features_that_are_fed_are_normalised_as_those_of_audio() -> None:
    samples_BS = torch.randn(2, 600, generator=torch.Generator().manual_seed(1))
    caches = no_caches(2, 5)
    raw_BWF = model().frontend.features(samples_BS)
    num_real_B = torch.tensor([raw_BWF.shape[1], 3])
    fed = model().forward_features(raw_BWF, caches, num_real_B)
    heard = model().forward_audio(samples_BS, caches, num_real_B)
    assert torch.equal(fed.encoded_BTD, heard.encoded_BTD)
    assert not torch.equal(fed.encoded_BTD, model().encoder.forward_chunk(raw_BWF, caches))


def test_padding_takes_the_place_of_frames_that_no_audio_gave_before_normalisation() -> None:
    frontend = Loudness()
    frontend.padding = FeaturePadding(value=-2.5, tail_frames=4)
    features_BWF = torch.randn(3, 5, 2, generator=torch.Generator().manual_seed(3))
    padded_BWF = frontend.pad(features_BWF, torch.tensor([0, 3, 5]))
    for row, num_real in enumerate([0, 3, 5]):
        assert torch.equal(padded_BWF[row, :num_real], features_BWF[row, :num_real])
        assert (padded_BWF[row, num_real:] == -2.5).all()
    assert padded_BWF.dtype == torch.float32
    unpadded_BWF = Loudness().pad(features_BWF, torch.tensor([0, 3, 5]))
    assert torch.equal(unpadded_BWF, features_BWF)
    padded = AcousticModel(frontend, Triples(), [CtcHead(4, 5, blank_id=0)])
    output = padded.forward_features(features_BWF, no_caches(3, 1), torch.tensor([0, 3, 5]))
    expected_BTD = padded.encoder.forward_chunk(10.0 * padded_BWF, no_caches(3, 1))
    assert torch.equal(output.encoded_BTD, expected_BTD)


def test_a_front_end_without_a_normalisation_gives_its_features() -> None:
    frontend = KaldiFrontend(LogMelFilterbank())
    samples_BS = torch.randn(1, 4000, generator=torch.Generator().manual_seed(2))
    assert torch.equal(frontend(samples_BS), frontend.features(samples_BS))


@given(
    rate=st.sampled_from([8000, 11025, 16000, 24000]),
    length_ms=st.floats(5.0, 40.0),
    part=st.floats(0.2, 1.0),
    num_samples=st.integers(0, 3000),
)
def test_kaldis_features_have_the_frames_that_their_geometry_counts(
    rate: int, length_ms: float, part: float, num_samples: int
) -> None:
    config = FbankConfig(
        sample_rate=rate,
        num_mel_bins=5,
        frame_length_ms=length_ms,
        frame_shift_ms=part * length_ms,
    )
    frontend = KaldiFrontend(LogMelFilterbank(config), GlobalCmvn(torch.zeros(5), torch.ones(5)))
    frames = frontend.geometry
    assert (frames.sample_rate, frames.num_bins) == (rate, 5)
    num_frames = frames.num_frames(num_samples)
    assert frontend(torch.zeros(1, num_samples)).shape == (1, num_frames, 5)
    if num_frames:
        assert frames.num_samples(num_frames) <= num_samples
    assert frames.num_samples(num_frames + 1) > num_samples


def test_statistics_of_another_number_of_bins_are_refused_with_both() -> None:
    cmvn = GlobalCmvn(torch.zeros(40), torch.ones(40))
    with pytest.raises(ConfigError, match="40 bins, and the features have 80"):
        KaldiFrontend(LogMelFilterbank(), cmvn)


def test_a_window_is_made_of_what_the_encoder_declares() -> None:
    geometry = WindowGeometry.of(FRAMES, chunk_frames=6, subsampling=3, right_context_frames=2)
    assert (geometry.window_frames, geometry.stride_frames, geometry.min_frames) == (18, 18, 3)
    assert [geometry.num_encoder_frames(n) for n in (2, 3, 5, 6, 18)] == [0, 1, 1, 2, 6]
