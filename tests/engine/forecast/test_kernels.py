"""The time of what has no estimated cycles, from HLO and bundles cut from what libtpu 0.0.42 wrote.

Pallas kernels, random bits, sorts, gathers and scatters.
"""

import pytest

from engine.forecast import kernels, operations
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
    assert kernels.issued(BUNDLES) == (ISSUED, 0)
    assert kernels.issued("no bundles here\n") == (0, 1)
    assert kernels.issued(BUNDLES.replace("LB", "  ")) == (0x14, 0)  # branches, and no loop


def test_a_loop_of_unknown_length_counts_once():
    """A loop begins the region that its last branch goes back to."""
    dynamic = BUNDLES.replace("%s250_s17, 8 /* loop exit test */", "%s250_s17, %s3").replace(
        "[#allocation5]] }", "[#allocation5]] } /* Start region 98 :: Start region 12 */"
    )
    assert kernels.issued(dynamic) == (ISSUED - 256 * 8 * 7, 1)


# Of a top-k of 64, for v5e: the loops over the rows, the windows of a row and the results are one
# pipeline, so that the last round of the inner loop has the test of the one around it.
TOP_K = """\
   0x0   :  { %s1 = smov 0 }
   0x6 LB: > { %s25_s12 = sadd.s32 1, %s37568_s9 } /* Start region 5061 */
  0x20 LB: >> { %s85_s22 = sadd.s32 1, %s37584_s20 } /* Start region 5050 */
 0xbf5 LB: >>> { %v21425_v30 = vld [vmem:[#allocation16] sm:$0xff] } /* Start region 5039 */
 0xbf7   : >>> { %p21421_p13 = scmp.ge.s32.totalorder %s21424_s20, 64 /* loop exit test */ }
 0xbf9   : >>> { %p79_p0 = scmp.ge.s32.totalorder (%p21421_p13), %s82_s21, 2 /* loop exit test */ }
0x18be   : >> { %v32145_v36 = vld [vmem:[#allocation13 + $0x3f] ss:$-1 sm:$0xff] (%p21421_p13) }
0x190e   : >>> { %21423 = sbr.rel (!%p21421_p13) target = $region5039 }
0x1a82   : >> { %81 = sbr.rel (!%p79_p0) target = $region5050 }
0x1aae   : > { %p13_p2 = scmp.ge.s32.totalorder %s16_s10, 5 /* loop exit test */ }
0x1aaf   :  { %15 = sbr.rel (!%p13_p2) target = $region5061 }
"""


def test_the_test_of_a_loop_may_be_inside_of_another():
    assert kernels.issued(TOP_K) == (1 + 5 * (1 + 2 * (1 + 64 * 5 + 1) + 2), 0)


def test_sorts_gathers_and_scatters_on_the_chip_take_their_bundles():
    """They have no cycles, and no bytes where all is in the core's memory."""
    text = """\
%fused_computation.1 (p.1: f32[8000], p.2: s32[4000]) -> f32[4000] {
  %p.1 = f32[8000]{0:T(1024)S(1)} parameter(0)
  %p.2 = s32[4000]{0:T(1024)S(1)} parameter(1)
  ROOT %g.1 = f32[4000]{0:T(1024)S(1)} gather(%p.1, %p.2)
}

ENTRY %main.1 (x.1: f32[8000]) -> f32[4000] {
  %x.1 = f32[8000]{0:T(1024)S(1)} parameter(0)
  %sort = (f32[8000]{0:T(1024)S(1)}, s32[8000]{0:T(1024)S(1)}) sort(%x.1, %x.1), to_apply=%less
  %i.1 = s32[4000]{0:T(1024)S(1)} custom-call(%x.1), custom_call_target="TopK"
  %sort.1 = (f32[8000]{0:T(1024)S(1)}, s32[8000]{0:T(1024)S(1)}) sort(%x.1, %x.1), to_apply=%less
  %sort.2 = (f32[8000]{0:T(1024)S(1)}, s32[8000]{0:T(1024)S(1)}) sort(%x.1, %i.1), to_apply=%less
  ROOT %gather_fusion = f32[4000]{0:T(1024)S(1)} fusion(%x.1, %i.1), kind=kCustom, \
calls=%fused_computation.1
}
"""
    bundles = {"sort": (7660, 0), "i.1": (1500, 0), "gather_fusion": (13852, 3), "reshape": (9, 0)}
    found = operations.read(text, V5E, bundles).all
    seconds = {x.name: (x.kind, x.moved, pytest.approx(x.seconds)) for x in found}
    assert seconds == {
        "sort": ("sort", 0, 7660 / 1.5e9),
        "sort.1": ("sort", 0, 7660 / 1.5e9),  # equal: libtpu writes one file for both
        "sort.2": ("sort", 0, 0.0),  # of other operands
        "i.1": ("sort", 0, 1e-6),
        "gather_fusion": ("gather", 0, 13852 / 1.5e9),
    }
    estimated = text.replace(
        "calls=%fused_computation.1\n",
        'calls=%fused_computation.1, backend_config={"estimated_cycles":"6"}\n',
    )
    (gather,) = [x for x in operations.read(estimated, V5E, bundles).all if x.cycles]
    assert (gather.kind, gather.seconds) == ("", pytest.approx(0.25 * 6 / 1.5e9))


def kernels_of(text: str, bundles: dict[str, tuple[int, int]]) -> dict[str, Operation]:
    return {x.name: x for x in operations.read(text, V5E, bundles).all if x.kind == "kernel"}


def test_a_kernel_takes_the_longer_of_its_bytes_and_its_bundles():
    found = kernels_of(HLO, {"k.3": (10, 0), "k.5": (777_000, 0)})
    by_bytes = V5E.chip.operation_seconds(0, 2 * ARRAY, 0)
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
    assert bits.seconds == V5E.chip.operation_seconds(0, bits.moved, 0)


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
    assert kernels.read_bundles() == {"k.3": (ISSUED, 0), "odd-name": (0, 1)}
