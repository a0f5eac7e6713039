"""What the compiler said is kept, under a key that has all that it depends on."""

import gzip
import types
from typing import Any

import pytest

from engine.forecast import buffers, cache, kernels
from engine.forecast.buffers import Buffer, Memory
from engine.forecast.topology import parse_slices

LARGEST = (
    Buffer("fusion.1", "(f32[8]{0:T(128)}, s32[])", 32, "", False),
    Buffer("x", "f32[]", 4, "a", True),
)
MEMORY = Memory(parameters={0: 70, 2: 30}, lasting=10, temporaries=7, largest=LARGEST)
V5E, V3 = parse_slices("v5e-8, v3-8")


class Lowered:
    """A program that counts how often it is compiled."""

    def __init__(self, text: str = "module", devices: tuple[int, ...] = (0, 1), options: Any = ()):
        self.text, self.compilations = text, 0
        self._lowering = types.SimpleNamespace(
            _device_list=[types.SimpleNamespace(id=i) for i in devices],
            _compiler_options_kvs=options,
        )

    def as_text(self, debug_info: bool = False) -> str:
        return self.text + " loc" * debug_info

    def compile(self, compiler_options: Any) -> Any:
        self.compilations += 1
        memory = types.SimpleNamespace(
            argument_size_in_bytes=100,
            output_size_in_bytes=60,
            alias_size_in_bytes=50,
            temp_size_in_bytes=7,
            generated_code_size_in_bytes=3,
        )
        return types.SimpleNamespace(memory_analysis=lambda: memory, as_text=lambda: "ENTRY")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "FOLDER", str(tmp_path / "kept"))
    monkeypatch.setattr(buffers, "read", lambda folder: MEMORY)
    monkeypatch.setattr(kernels, "read_bundles", lambda: {"kernel.1": [12, 0], "kernel.2": [0, 1]})
    return tmp_path / "kept"


def facts(lowered: Any, topology: Any = V5E) -> tuple[cache.Compiled, str]:
    said = []
    return cache.compiled_facts(lowered, topology, said.append), said[0]


def test_a_program_is_compiled_once(folder):
    first, said = facts(lowered := Lowered())
    assert (first.text, first.arguments, first.outputs) == ("ENTRY", 100, 10)
    assert first.parameters == [70, 0, 30]
    assert [tuple(one) for one in first.largest] == [
        ("(f32[8], s32[]) fusion.1", 32),
        ("f32[] a", 4),
    ]
    assert first.bundles == {"kernel.1": [12, 0], "kernel.2": [0, 1]}
    assert said.endswith("by its size") and lowered.compilations == 1
    again, said = facts(lowered := Lowered())
    assert (again.bundles, again.parameters) == (first.bundles, first.parameters)
    assert said.startswith("compiled before") and lowered.compilations == 0


@pytest.mark.parametrize(
    ("lowered", "topology"),
    [
        (Lowered("module of others"), V5E),
        (Lowered(devices=(1, 0)), V5E),
        (Lowered(options=(("xla_option", "1"),)), V5E),
        (Lowered(), V3),
    ],
)
def test_what_the_compiler_sees_is_in_the_key(lowered, topology, folder):
    facts(Lowered())
    facts(lowered, topology)
    assert lowered.compilations == 1


def test_flags_are_in_the_key_and_the_folder_of_the_kernels_is_not(folder, monkeypatch):
    facts(Lowered())
    for i, path in enumerate(("/tmp/one", "/tmp/other")):
        monkeypatch.setenv(kernels.FOLDER, path)
        monkeypatch.setenv("LIBTPU_INIT_ARGS", f"--dump_to={path}")
        facts(lowered := Lowered())
        assert lowered.compilations == (i == 0)
    monkeypatch.setattr(cache, "versions", lambda: {"jax": "9"})
    facts(lowered := Lowered())
    assert lowered.compilations == 1


@pytest.mark.parametrize("content", ["", "no gzip", "{}", "["])
def test_a_damaged_file_is_replaced(content, folder):
    facts(Lowered())
    (path,) = folder.glob("*.json.gz")
    path.write_bytes(gzip.compress(content.encode()) if content in "{}[" else content.encode())
    assert facts(lowered := Lowered())[0].arguments == 100 and lowered.compilations == 1
    facts(lowered := Lowered())
    assert lowered.compilations == 0


def test_a_folder_that_cannot_be_written_is_no_error(folder):
    folder.write_text("a file")
    assert facts(Lowered())[0].temporaries == 7


def test_no_half_written_file_stays(folder, monkeypatch):
    monkeypatch.setattr(cache.json, "dump", lambda *_: (_ for _ in ()).throw(OSError("full")))
    facts(Lowered())
    assert [*folder.glob("*")] == []


def test_how_long_a_compilation_takes():
    low, high, why = cache.expected_seconds(1_300_000, "v3", [])
    assert low < 50 and high > 130 and why == "by its size"  # a network took 50 to 130 s
    past = [
        {"chip": "v3", "size": 1_000_000, "seconds": 100.0},
        {"chip": "v5e", "size": 1_000_000, "seconds": 900.0},
        {"chip": "v3", "size": 1_000, "seconds": 0.1},
    ]
    low, high, why = cache.expected_seconds(2_000_000, "v3", past)
    assert (low, high, why) == (100, 400, "as earlier compilations here")


def test_the_next_line_is_by_earlier_compilations(folder):
    facts(Lowered("a"))
    assert facts(Lowered("b"))[1].endswith("as earlier compilations here")
    history = folder / "compilations.jsonl"
    history.write_text(f'{history.read_text()}7\n{{"chip": "v5e"}}\nhalf a li')
    assert facts(Lowered("c"))[1].endswith("as earlier compilations here")
