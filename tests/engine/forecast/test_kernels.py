"""The price of Pallas kernels, from HLO and bundles cut from what libtpu 0.0.42 wrote."""

import pytest

from engine.forecast import hlo, kernels, topology

V5E = topology.CHIPS["v5e"]
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


def test_a_kernel_takes_the_longer_of_its_bytes_and_its_bundles():
    cost = hlo.cost(HLO)
    assert cost.cycles == 1000
    found = {"k.3": 10, "k.5": 777}
    done = kernels.priced(cost, V5E, found)
    first, second, third = sorted(done.kernels)
    by_bytes = 2 * ARRAY / V5E.bandwidth * V5E.clock
    assert first.cycles == second.cycles == pytest.approx(by_bytes, abs=1)
    assert first.bundles == second.bundles == 10  # equal kernels: one file for both
    assert (third.name, third.cycles, third.bundles) == ("k.5", 777, 777)
    assert done.cycles == 1000 + 2 * first.cycles + 777
    assert done.names["jit(f)/k/pallas_call"] == (2 * first.cycles, 0)
    assert done.moved == cost.moved == sum(k.moved for k in cost.kernels) + ARRAY


def test_random_bits_count_by_their_bytes():
    text = HLO.replace(
        "  ROOT %add.9",
        "  %r.1 = u32[32768,256]{1,0:T(8,128)} rng-bit-generator(%s), algorithm=rng_default\n"
        "  ROOT %add.9",
    )
    done = kernels.priced(hlo.cost(text), V5E, {})
    (bits,) = [kernel for kernel in done.kernels if kernel.name == "r.1"]
    assert bits.moved == 2 * ARRAY
    assert bits.cycles == pytest.approx(bits.moved / V5E.bandwidth * V5E.clock, abs=1)


def test_a_note_says_what_kernels_count():
    assert kernels.notes((), V5E) == []
    done = kernels.priced(hlo.cost(HLO), V5E, {})
    price, warning = kernels.notes(done.kernels, V5E)
    assert "3 runs of kernels without an estimate count as 0.1 ms" in price
    assert warning.startswith("too short: 3 kernels count by their bytes alone")
    known = kernels.priced(hlo.cost(HLO), V5E, {"k.3": 10, "k.5": 7})
    assert len(kernels.notes(known.kernels, V5E)) == 1


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
