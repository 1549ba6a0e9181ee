"""Frames of another length, shift or sample rate are honoured from the wire on, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kaldi_native_fbank as knf
import numpy as np
import numpy.typing as npt
import pytest
import torch

from oasr_backend.checkpoints import open_checkpoint
from oasr_backend.config import ServingConfig
from oasr_backend.features import FbankConfig, StreamingResampler
from oasr_backend.options import StreamOptions
from oasr_backend.parity import stream_log_probs
from oasr_backend.streaming.assemble import load_engine
from oasr_backend.streaming.engine import Engine
from oasr_backend.types import AudioChunk
from tests.checkpoint_helpers import copy_golden, edit_config, edit_features, kaldi, refusal
from tests.engine_helpers import noise

FloatArray = npt.NDArray[np.float32]

#: Sample rate in Hz, then options of fbank_conf.
GEOMETRIES: list[tuple[int, dict[str, Any]]] = [
    (16000, {"frame_length": 32, "frame_shift": 10}),
    (16000, {"frame_length": 25, "frame_shift": 12.5}),
    (16000, {"frame_length": 32, "frame_shift": 12.5, "window_type": "hamming"}),
    (8000, {"frame_length": 25, "frame_shift": 10}),
    (24000, {"frame_length": 25, "frame_shift": 10, "dither": 1.0}),
    (11025, {"frame_length": 20, "frame_shift": 20, "window_type": "hanning"}),
]
SERVER = {"chunk_size": 8, "num_left_chunks": 2}
#: Noise from a lower rate than the model's would leave the upper bins to rounding.
CLIENT_RATE_HZ = 24000


@pytest.fixture(name="directory")
def _directory(tmp_path: Path) -> Path:
    return copy_golden(tmp_path)


def kaldi_features(samples_S: FloatArray, rate: int, options: dict[str, Any]) -> FloatArray:
    """(T, 80) of samples at the model's rate."""
    config = knf.FbankOptions()
    config.frame_opts.samp_freq = rate
    config.frame_opts.dither = 0.0
    config.frame_opts.frame_length_ms = options["frame_length"]
    config.frame_opts.frame_shift_ms = options["frame_shift"]
    config.frame_opts.window_type = options.get("window_type", "povey")
    config.mel_opts.num_bins = 80
    fbank = knf.OnlineFbank(config)
    fbank.accept_waveform(rate, (samples_S * 32768.0).tolist())
    fbank.input_finished()
    return np.stack([fbank.get_frame(i) for i in range(fbank.num_frames_ready)])


def fbank(directory: Path) -> FbankConfig:
    return kaldi(open_checkpoint(directory).load().model).filterbank.config


def streamed(engine: Engine, samples_S: FloatArray) -> tuple[FloatArray, dict[str, Any]]:
    """The log-probs (T', V) of one stream in pieces, and its last document."""
    outputs: list[FloatArray] = []

    def keep(_module: torch.nn.Module, _inputs: Any, logits_BTV: torch.Tensor) -> None:
        outputs.append(logits_BTV[0].float().log_softmax(-1).numpy())

    handle = engine.parts.model.heads["ctc"].register_forward_hook(keep)
    document: dict[str, Any] = {}
    for start in range(0, samples_S.size, 3000):
        is_last = start + 3000 >= samples_S.size
        options = None if start else StreamOptions(sample_rate=CLIENT_RATE_HZ)
        chunk = AudioChunk("a", samples_S[start : start + 3000], start == 0, is_last, options)
        (result,) = engine.process([chunk._replace(wants_result=True)])
        assert result.error is None, result.error
        document = dict(result.document or {})
    handle.remove()
    return np.concatenate(outputs)[: document["num_frames"]], document


@pytest.mark.parametrize(("rate", "options"), GEOMETRIES)
def test_a_stream_is_decoded_from_kaldis_frames_of_the_models_own_geometry(
    directory: Path, rate: int, options: dict[str, Any]
) -> None:
    edit_features(directory, sample_rate=rate, **options)
    samples_S = noise(0, seconds=4.5)
    resampler = StreamingResampler(CLIENT_RATE_HZ, rate)
    heard_S = np.concatenate([resampler.accept(samples_S), resampler.finish()])
    feats_TF = kaldi_features(heard_S, rate, options)
    engine = load_engine(directory, ServingConfig.of(**SERVER, tail_padding=False), device="cpu")
    log_probs_TV, document = streamed(engine, samples_S)
    expected_TV = stream_log_probs(directory, feats_TF, **SERVER)
    assert log_probs_TV.shape == expected_TV.shape
    # Rounding of the features moves a log-prob by a thousandth, another geometry by whole numbers.
    np.testing.assert_allclose(log_probs_TV, expected_TV, atol=1e-2, rtol=0)
    assert document["audio_s"] == 3.0


@pytest.mark.parametrize(("rate", "options"), GEOMETRIES)
def test_an_encoder_frame_lasts_as_long_as_the_frames_that_it_is_made_of(
    directory: Path, rate: int, options: dict[str, Any]
) -> None:
    edit_features(directory, sample_rate=rate, **options)
    engine = load_engine(directory, ServingConfig(), device="cpu")
    shift_s = int(rate * options["frame_shift"] / 1000) / rate
    assert engine.parts.geometry.encoder_frame_s == pytest.approx(4 * shift_s)
    options = StreamOptions(word_times=True, sample_rate=CLIENT_RATE_HZ)
    samples_S = noise(3, seconds=6.0)
    chunk = AudioChunk("a", samples_S, is_first=True, is_last=True, options=options)
    (result,) = engine.process([chunk._replace(wants_result=True)])
    assert result.document is not None
    starts_s = np.array([token["start_s"] for token in result.document["tokens"]])
    # Tokens of the padding share the end of the audio, and those close before them make room.
    starts_s = starts_s[starts_s < 2.0]
    assert starts_s.size
    frames = (starts_s / engine.parts.geometry.encoder_frame_s).round()
    # Times are rounded to a thousandth.
    assert np.abs(frames * engine.parts.geometry.encoder_frame_s - starts_s).max() <= 0.00051


def test_the_longest_frame_lasts_a_second(directory: Path) -> None:
    edit_features(directory, frame_length=1000, frame_shift=500)
    assert fbank(directory).frame_length_samples == 16000


def test_dither_belongs_to_training(directory: Path) -> None:
    plain = fbank(directory)
    edit_features(directory, dither=1.0)
    assert fbank(directory) == plain
    assert plain.dither == 0.0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sample_rate": 4000}, ["resample_rate=4000", "8000 .. 48000"]),
        ({"sample_rate": 96000}, ["resample_rate=96000", "8000 .. 48000"]),
        ({"sample_rate": "fast"}, ["resample_rate='fast'", "whole number"]),
        ({"sample_rate": 16000.5}, ["resample_rate=16000.5", "whole number"]),
        ({"frame_length": "25ms"}, ["frame_length='25ms'", "positive number"]),
        ({"frame_length": 0}, ["frame_length=0", "positive number"]),
        ({"frame_shift": -10}, ["frame_shift=-10", "positive number"]),
        ({"frame_shift": float("nan")}, ["frame_shift=nan", "positive number"]),
        ({"frame_length": 100000}, ["frame_length=100000", "1000 or less"]),
        ({"frame_length": 1000.5}, ["frame_length=1000.5", "1000 or less"]),
        ({"dither": "x"}, ["fbank_conf.dither='x'", "0 or more"]),
        ({"dither": float("nan")}, ["fbank_conf.dither=nan", "0 or more"]),
        ({"dither": float("inf")}, ["fbank_conf.dither=inf", "0 or more"]),
        ({"dither": -1}, ["fbank_conf.dither=-1", "0 or more"]),
        ({"frame_shift": 30}, ["frame_shift=30", "25 or less, the frame_length"]),
        ({"frame_length": 0.01, "frame_shift": 0.01}, ["0.01 ms", "shorter than a sample"]),
        ({"window_type": "kaiser"}, ["'kaiser'", "povey"]),
        ({"snip_edges": False}, ["fbank_conf.snip_edges=False", "unknown", "window_type"]),
        ({"num_mel_bins": 40}, ["input_dim=80", "num_mel_bins=40"]),
    ],
)
def test_an_option_of_the_frames_that_cannot_be_honoured_is_refused_by_name(
    directory: Path, options: dict[str, Any], words: list[str]
) -> None:
    edit_features(directory, **options)
    refusal(directory, "train.yaml", *words)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda c: c["dataset_conf"].update(feats_type="mfcc"), ["feats_type='mfcc'", "fbank"]),
        (
            lambda c: c.update(collate_conf={"feature_extraction_conf": {"frame_shift": 12.5}}),
            ["feature_extraction_conf.frame_shift=12.5", "frame_shift=10"],
        ),
        (
            lambda c: c["dataset_conf"]["resample_conf"].update(method="sinc"),
            ["resample_conf.method='sinc'", "knows resample_rate"],
        ),
        (lambda c: c["dataset_conf"].update(fbank_conf=3), ["fbank_conf is 3", "by name"]),
        (lambda c: c.update(dataset_conf=[1]), ["dataset_conf is [1]"]),
        (lambda c: c.update(encoder_conf="big"), ["encoder_conf is 'big'"]),
        (lambda c: c.update(cmvn_conf=[1]), ["cmvn_conf is [1]", "by name"]),
        (
            lambda c: c["tokenizer_conf"].update(special_tokens=["<sos>"]),
            ["special_tokens is ['<sos>']", "by name"],
        ),
        (lambda c: c["encoder_conf"].update(input_layer=["conv2d"]), ["input_layer=['conv2d']"]),
        (lambda c: c["encoder_conf"].update({7: 8, "x": 9}), ["encoder_conf.7=8 is unknown"]),
    ],
)
def test_features_that_are_not_computed_are_refused_by_name(
    directory: Path, edit: Any, words: list[str]
) -> None:
    edit_config(directory, edit)
    refusal(directory, "train.yaml", *words)
