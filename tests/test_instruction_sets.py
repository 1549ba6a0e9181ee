"""The limits that stand for other machines' instruction sets are set, and are in force."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.instruction_sets import __main__ as program
from tests.instruction_sets.environments import ENVIRONMENTS, Environment
from tests.instruction_sets.in_force import Witness, level_of

BY_NAME = {one.name: one for one in ENVIRONMENTS}
BASELINE = BY_NAME["baseline-1"]


def said(*, mkl: str, onednn: str, aten: str = "DEFAULT", threads: int = 1) -> Witness:
    """A witness's output in the words of the libraries."""
    answer: dict[str, Any] = {"aten": aten, "threads": threads, "documents": []}
    return Witness.from_output(
        f"MKL_VERBOSE oneMKL 2024.0 Product build 1 for Intel(R) 64 architecture {mkl}, Lnx 2GHz\n"
        f"MKL_VERBOSE SGEMM(N,N,64) 1.30ms CNR:OFF\n"
        f"onednn_verbose,v1,info,cpu,isa:{onednn}\n\n{json.dumps(answer)}\n"
    )


def test_every_level_and_1_2_and_4_threads_are_covered() -> None:
    assert {one.aten for one in ENVIRONMENTS} == {"baseline", "avx2", "avx512"}
    assert {one.num_threads for one in ENVIRONMENTS} == {1, 2, 4}
    for library in ("mkl", "onednn"):
        limits = {one.limits[library] for one in ENVIRONMENTS}
        assert limits == {"baseline", "avx2", "avx512", None}


@pytest.mark.parametrize(
    ("spoken", "level"),
    [
        ("DEFAULT", "baseline"),
        ("AVX2", "avx2"),
        ("AVX512", "avx512"),
        ("Intel SSE4.1", "baseline"),
        ("Intel AVX", "baseline"),
        ("Intel AVX2 with Intel DL Boost", "avx2"),
        ("Intel AVX-512 with AVX512BW, AVX512VL, and AVX512DQ extensions", "avx512"),
        ("Intel AVX 10.1", "avx512"),
        ("Intel(R) Architecture processors", "baseline"),
        ("Intel(R) Advanced Vector Extensions 2 (Intel(R) AVX2) enabled processors", "avx2"),
    ],
)
def test_the_words_of_each_library_are_understood(spoken: str, level: str) -> None:
    assert level_of(spoken) == level


def test_a_limit_without_effect_is_named() -> None:
    obeyed = said(mkl="Intel(R) Architecture processors", onednn="Intel SSE4.1")
    assert list(obeyed.contradictions(BASELINE)) == []
    ignored = said(mkl="Intel(R) AVX2 enabled", onednn="Intel AVX 10.1", aten="AVX2", threads=2)
    assert list(ignored.contradictions(BASELINE)) == [
        "aten runs on avx2, beyond its limit baseline",
        "mkl runs on avx2, beyond its limit baseline",
        "onednn runs on avx512, beyond its limit baseline",
        "aten runs on avx2, not on baseline",
        "2 threads, not 1",
    ]


def test_an_older_kernel_than_the_limit_allows_is_told_and_no_fault() -> None:
    """MKL takes its oldest ones on processors of other makes."""
    older = said(mkl="Intel(R) Architecture processors", onednn="Intel AVX2", aten="AVX2")
    assert list(older.contradictions(BY_NAME["avx2-1"])) == []
    assert "mkl=baseline" in str(older)


def test_the_oldest_instructions_are_in_force_in_a_child() -> None:
    output = program.output_of(BASELINE, program.WITNESS)
    witness = Witness.from_output(output)
    assert witness.levels == {"aten": "baseline", "mkl": "baseline", "onednn": "baseline"}
    assert witness.num_threads == 1
    assert all(document["words"] for document in witness.documents)


def test_an_environment_beyond_the_processor_is_left_out_and_said_to_be(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(program, "native_level", lambda: "avx2")
    assert program.main(["avx512-2"]) == 0
    assert "avx512-2: left out, this processor ends at avx2" in capsys.readouterr().out


def test_what_another_environment_does_not_hear_is_a_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    witness = Witness(
        levels=dict.fromkeys(BASELINE.limits, "baseline"), num_threads=1, documents=[]
    )
    monkeypatch.setattr(program, "output_of", lambda *_: "")
    monkeypatch.setattr(Witness, "from_output", lambda _: witness)
    other = Witness(witness.levels, 1, [{"text": "other"}])
    with pytest.raises(program.DeviationError, match="hears what others do not"):
        program.check(BASELINE, other)


def test_variables_of_the_caller_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKL_CBWR", "AVX2")
    monkeypatch.setenv("OMP_NUM_THREADS", "16")
    found = Environment("plain-2", 2, aten="avx2").process_environment()
    assert "MKL_CBWR" not in found
    assert (found["OMP_NUM_THREADS"], found["ATEN_CPU_CAPABILITY"]) == ("2", "avx2")
