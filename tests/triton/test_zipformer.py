"""icefall's checkpoints on a live server: the same model, clients and options as any other."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import soundfile

from tests.conftest import GOLDEN_DIR
from tests.triton.conftest import Pcm16
from tests.triton.variants import LoadedModel, Variant, VariantServer
from tests.zipformer_goldens import ZipGolden, zip_goldens

#: Each checkpoint, and the setting with other chunks.
SERVED = ("zip_rnnt_small-c16_l8", "zip_ctc_small-c32_l8", "zip_ctc_epoch-c8_l8")


@pytest.fixture(name="golden", params=SERVED, scope="module")
def _golden(request: pytest.FixtureRequest) -> ZipGolden:
    return zip_goldens()[request.param]


@pytest.fixture(name="model", scope="module")
def _model(variant_server: VariantServer, golden: ZipGolden) -> Iterator[LoadedModel]:
    settings = {name: str(value) for name, value in golden.settings.items()}
    with variant_server.loaded(Variant("zipformer", settings, golden.directory)) as model:
        yield model


def recording(golden: ZipGolden) -> Pcm16:
    pcm: Pcm16 = soundfile.read(golden.directory / "audio.wav", dtype="int16")[0]
    return pcm


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_three_streams_at_other_offsets_have_icefalls_text(
    model: LoadedModel, golden: ZipGolden, protocol: str
) -> None:
    pcm = recording(golden)

    def stream(number: int, decoder: str) -> str:
        pieces = np.split(pcm, range(2_000 + 900 * number, pcm.size, 5_000 + 400 * number))
        with model.wire(protocol) as wire:
            return wire.stream(100 + number, pieces, decoder=decoder)

    for decoder, expected in golden.texts.items():
        with ThreadPoolExecutor(3) as pool:
            texts = pool.map(stream, range(3), [decoder] * 3)
        assert list(texts) == [expected] * 3


def test_the_search_of_a_stream_that_names_none_is_the_transducer(
    variant_server: VariantServer,
) -> None:
    golden = zip_goldens()["zip_rnnt_small-c16_l8"]
    settings = {name: str(value) for name, value in golden.settings.items()}
    with (
        variant_server.loaded(Variant("rnnt", settings, GOLDEN_DIR / "zip_rnnt_small")) as model,
        model.wire() as wire,
    ):
        assert wire.send(1, recording(golden), "SE") == golden.texts["transducer_greedy"]
