"""Measures the demo's texts: word error rates by option, recall of hotwords, half precision.

    python -m benchmarks.accuracy [--device cuda] [--dtype bfloat16 --dtype float16]

Every recording of the demo goes through the engine whole. All options see the same audio.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from oasr_client.manifest import Reference, load_manifest, word_errors
from rich.console import Console

from benchmarks.report import RESULTS_DIRECTORY, Figure, Report
from benchmarks.workload import DEMO_DIRECTORY, read_audio
from oasr_backend.config import ServingConfig
from oasr_backend.options import ParameterValue, StreamOptions
from oasr_backend.streaming.assemble import load_engine
from oasr_backend.streaming.engine import Engine
from oasr_backend.types import AudioChunk

Parameters = Mapping[str, ParameterValue]
GREEDY: Parameters = {"decoder": "greedy"}
BEAM: Parameters = {"decoder": "prefix_beam"}
RESCORED: Parameters = {**BEAM, "rescoring": True}
#: Each is a log-prob for one unit; the first is the default.
BOOSTS = (1.0, 1.5)
#: Words that no recording holds.
ABSENT = (
    "zeppelin", "quartz", "marmalade", "octopus", "ballerina", "hurricane", "elephant", "diamond",
    "volcano", "kangaroo", "symphony", "telescope", "penguin", "chocolate", "galaxy", "pyramid",
    "lantern", "whisper", "orchestra", "cinnamon",
)  # fmt: skip
_LEAST_LETTERS = 6


def recordings() -> list[Reference]:
    """The demo's recordings with their reference texts: 60 of eval/, then 10 of testset/."""
    folders = [DEMO_DIRECTORY / name for name in ("eval", "testset")]
    return [entry for folder in folders for entry in load_manifest(folder / "manifest.json")]


def groups(references: Sequence[Reference]) -> dict[str, list[Reference]]:
    """All recordings, those that ship as testset/, and those that a person reads."""
    testset = [one for one in references if one.audio.parent.name == "testset"]
    natural = [one for one in testset if one.audio.name.startswith("librivox")]
    return {"all": list(references), "testset": testset, "natural": natural}


def rare_words(references: Sequence[Reference]) -> list[list[str]]:
    """For each recording its words of six letters or more that no other recording holds."""
    counts = Counter(word for one in references for word in set(one.text.split()))
    return [
        [w for w in dict.fromkeys(one.text.split()) if counts[w] == 1 and len(w) >= _LEAST_LETTERS]
        for one in references
    ]


def recall(texts: Sequence[str], words: Sequence[Sequence[str]]) -> float:
    """The share of `words`, a list a text, that their text holds."""
    found = [w in text.split() for text, own in zip(texts, words, strict=True) for w in own]
    return sum(found) / len(found)


def favouring(words: Sequence[str], boost: float) -> Parameters:
    """The prefix beam with these hotwords."""
    return {**BEAM, "hotwords": "|".join(words), "hotword_boost": boost} if words else BEAM


def transcribe(
    engine: Engine, references: Sequence[Reference], parameters: Sequence[Parameters]
) -> list[str]:
    """The final text of each recording; all streams share the steps. Raises a stream's error."""
    results = engine.process([
        AudioChunk(
            index, read_audio(one.audio), is_first=True, is_last=True,
            options=StreamOptions.from_parameters(asked, engine.config.defaults),
        )
        for index, (one, asked) in enumerate(zip(references, parameters, strict=True))
    ])  # fmt: skip
    engine.check_integrity()
    for result in results:
        if result.error is not None:
            raise result.error
    return [result.text for result in results]


class Contest:
    """One engine and its recordings; each method measures one thing about their texts."""

    def __init__(self, references: Sequence[Reference], *, device: str, dtype: str) -> None:
        config = ServingConfig.of(dtype=dtype)
        self._engine = load_engine(DEMO_DIRECTORY, config, device=device)
        self._references = references

    def texts(self, parameters: Parameters) -> list[str]:
        """The same parameters for every recording."""
        return transcribe(self._engine, self._references, [parameters] * len(self._references))

    def options(self) -> Iterator[Figure]:
        """The word error rates of each search, by group of recordings."""
        ways = {"greedy": GREEDY, "prefix beam 10": BEAM, "prefix beam 10, rescored": RESCORED}
        for name, parameters in ways.items():
            texts = self.texts(parameters)
            for group, members in groups(self._references).items():
                if members:
                    yield self._rate(f"{name}, {group}", texts, members)

    def hotwords(self) -> Iterator[Figure]:
        """Recall of rare words and word error rates, for no hotwords, own, all, absent ones."""
        rare = rare_words(self._references)
        yield from self._heard("no hotwords", [()] * len(rare), 0.0)
        everybodys = [word for words in rare for word in words]
        for boost in BOOSTS:
            yield from self._heard(f"own words, boost {boost}", rare, boost)
            yield from self._heard(f"all words, boost {boost}", [everybodys] * len(rare), boost)
            yield from self._heard(f"absent words, boost {boost}", [ABSENT] * len(rare), boost)

    def _heard(self, name: str, favoured: Sequence[Sequence[str]], boost: float) -> list[Figure]:
        parameters = [favouring(words, boost) for words in favoured]
        texts = transcribe(self._engine, self._references, parameters)
        share = recall(texts, rare_words(self._references))
        return [
            Figure(f"{name}: recall of rare words", "%", [share * 100]),
            self._rate(name, texts, self._references),
        ]

    def _rate(self, name: str, texts: Sequence[str], members: Sequence[Reference]) -> Figure:
        heard = {one.audio: text for one, text in zip(self._references, texts, strict=True)}
        return Figure(f"{name}: word error rate", "%", [word_errors(members, heard).rate * 100])


def changed_texts(
    references: Sequence[Reference], exact: Sequence[str], *, device: str, dtype: str
) -> Figure:
    """How many greedy texts are not those of float32, `exact`."""
    texts = Contest(references, device=device, dtype=dtype).texts(GREEDY)
    count = sum(text != other for text, other in zip(texts, exact, strict=True))
    return Figure(f"{dtype}: texts that differ from float32's", "texts", [float(count)])


def measure(references: Sequence[Reference], *, device: str, dtypes: Sequence[str]) -> Report:
    """Options and hotwords in float32, then what each of `dtypes` changes."""
    contest = Contest(references, device=device, dtype="float32")
    figures = [*contest.options(), *contest.hotwords()]
    exact = contest.texts(GREEDY)
    figures += [changed_texts(references, exact, device=device, dtype=name) for name in dtypes]
    configuration = {
        "checkpoint": DEMO_DIRECTORY.name,
        "device": device,
        "recordings": len(references),
        "rare_words": sum(map(len, rare_words(references))),
        "absent_words": len(ABSENT),
        "dtypes": list(dtypes),
        "threads": torch.get_num_threads(),
    }
    name = "accuracy" if device == "cpu" else f"accuracy-{device.partition(':')[0]}"
    return Report(name, configuration, figures)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy", description=__doc__)
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--dtype", action="append", default=[], help="may be repeated")
    parser.add_argument("--first", type=int, help="only so many recordings: prove that it runs")
    parser.add_argument("--results", type=Path, default=RESULTS_DIRECTORY)
    chosen = parser.parse_args(arguments)
    references = recordings()[: chosen.first]
    report = measure(references, device=chosen.device, dtypes=chosen.dtype)
    console = Console()
    report.show(console)
    console.print(f"[dim]written to {report.write(chosen.results)}")


if __name__ == "__main__":
    main()
