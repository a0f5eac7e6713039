"""The time of Pallas kernels, from HLO and bundles cut from what libtpu 0.0.42 wrote."""

import pytest

from engine.forecast import kernels, operations, timing
from engine.forecast.operations import Operation
from tests.engine.forecast.test_estimates import V5E

HLO = """\
%fused_computation.1 (p.1: bf16[8,128], p.2: bf16[8,128]) -> bf16[16,8,128] {
  %inner = bf16[8,128]{1,0:T(8,128)(2,1)} custom-call(%p.1), custom_call_target="tpu_custom_call", \
backend_config={"custom_call_config": {"body": "TUzvB"}}
  ROOT %dus = bf16[16,8,128]{2,1,0:T(8,128)(2,1)} dynamic-update-slice(%p.2, %inner)
}

ENTRY %main.1 (x.1: bf16[32768,256]) -> bf16[32768,256] {
  %x.1 = bf16[32768,256]{1,0:T(8,128)(2,1)} parameter(0)
  %k.3 = bf16[32768,256]{1,0:T(8,128)(2,1)} custom-call(%x.1), \
custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/k/pallas_call"}, \
backend_config={"custom_call_config":{"body":"TUzvA"},"x":1}
  %k.4 = bf16[32768,256]{1,0:T(8,128)(2,1)} custom-call(%k.3), \
custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/k/pallas_call"}, \
backend_config={"custom_call_config":{"body":"TUzvA"},"x":1}
  %k.5 = bf16[16,8,128]{2,1,0:T(8,128)(2,1)S(1)} fusion(%x.1, %x.1), kind=kCustom, \
calls=%fused_computation.1, backend_config={"used_scoped_memory_configs":[]}
  ROOT %add.9 = bf16[32768,256]{1,0:T(8,128)(2,1)} fusion(%k.4, %k.4), kind=kLoop, \
calls=%fused_computation.2, backend_config={"estimated_cycles":"1000"}
}
"""
ARRAY = 32768 * 256 * 2  # bytes
BUNDLES = """\
= control target key start
LB: loop body

     0   :  { %s2244_s9 = smov 0 /* copy for cssa */ }
   0x1 LB: > { %s10 = sadd.s32 4294967295, %s9 /* iteration index, stage = 1 */ }
   0x2   : > { %118 = sbr.rel (%p115_p2) target = $region28 }
   0x3   :  {}
   0x4   :  {}
   0x5 LB: >> { %v1 = vld [vmem:[#allocation5]] }
   0x6   : >> { %p247_p1 = scmp.ge.s32.totalorder %s250_s17, 8 /* loop exit test */ }
   0x7   : > { %v2 = vmul }
   0x8   : > { %249 = sbr.rel (!%p247_p1) target = $region98 }
   0x9   :  {}
   0xa   :  {}
   0xb   :  {}
   0xc   :  {}
   0xd PF: > { %p19_p8 = scmp.ge.s32.totalorder %s22_s19, 258 /* loop exit test */ }
   0xe   : > { %21 = sbr.rel (!%p19_p8) target = $region109 } /* End region 3 */
   0xf   :  {}
  0x10   :  {}
  0x11   :  {}
  0x12   :  {}
  0x13   :  {} /* exit bundle: %k.3 = custom-call(%x.1) */
"""
ISSUED = 1 + 256 * (4 + 8 * 8 + 2 + 4) + 1


def test_bundles_in_loops_count_as_often_as_these_run():
    assert kernels.issued(BUNDLES) == ISSUED
    assert kernels.issued("no bundles here\n") is None
    dynamic = BUNDLES.replace("%s250_s17, 8 /* loop exit test */", "%s250_s17, %s3")
    assert kernels.issued(dynamic) is None


def kernels_of(text: str, bundles: dict[str, int | None]) -> dict[str, Operation]:
    return {x.name: x for x in operations.read(text, V5E, bundles).all if x.is_kernel}


def test_a_kernel_takes_the_longer_of_its_bytes_and_its_bundles():
    found = kernels_of(HLO, {"k.3": 10, "k.5": 777_000})
    by_bytes = timing.operation_seconds(V5E.chip, 0, 2 * ARRAY, 0)
    assert found["k.3"].seconds == found["k.4"].seconds == pytest.approx(by_bytes)
    assert found["k.3"].bundles == found["k.4"].bundles == 10  # equal kernels: one file for both
    assert found["k.5"].bundles == 777_000
    assert found["k.5"].seconds == pytest.approx(777_000 / V5E.chip.clock)


def test_random_bits_count_by_their_bytes():
    text = HLO.replace(
        "  ROOT %add.9",
        "  %r.1 = u32[32768,256]{1,0:T(8,128)} rng-bit-generator(%s), algorithm=rng_default\n"
        "  ROOT %add.9",
    )
    bits = kernels_of(text, {})["r.1"]
    assert bits.moved == 2 * ARRAY
    assert bits.seconds == timing.operation_seconds(V5E.chip, 0, bits.moved, 0)


def test_libtpu_is_asked_and_its_files_are_read(tmp_path, monkeypatch):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--some=1")
    monkeypatch.delenv(kernels.FOLDER, raising=False)
    kernels.ask_for_bundles()
    assert kernels.os.environ["LIBTPU_INIT_ARGS"] == "--some=1" and kernels.read_bundles() == {}
    monkeypatch.setenv(kernels.FOLDER, str(tmp_path))
    kernels.ask_for_bundles()
    arguments = kernels.os.environ["LIBTPU_INIT_ARGS"].split()
    assert arguments[:2] == ["--some=1", f"--xla_jf_dump_to={tmp_path}"]
    (tmp_path / "179-k.3-00-schedule-analysis_final_bundles.txt").write_text("total: 20")
    (tmp_path / "179-k.3-01-final_bundles.txt").write_text("of another program")
    (tmp_path / "188-k.3-01-final_bundles.txt").write_text(BUNDLES)
    (tmp_path / "180-odd-name-01-final_bundles.txt").write_text("?")
    (tmp_path / "179-TLP-hlo.txt").write_text("?")
    assert kernels.read_bundles() == {"k.3": ISSUED, "odd-name": None}
