"""The hosts of a run compare their programs before it starts."""

from engine.cluster import facts


def test_every_file_of_a_room_is_part_of_the_program(tmp_path, monkeypatch):
    for name in ("main.py", "engine/a.py", "ops/a.py", "benchmarks/a.py", "benchmarks/ncf/b.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.setattr(facts, "_ROOT", tmp_path)
    before = facts.of({"seed": 3})
    assert before["config.seed"] == "3" and facts.of({"seed": 3}) == before
    (tmp_path / "benchmarks/ncf/b.py").write_text("changed")
    name = "the program (SHA-256 of its files)"
    assert facts.of({"seed": 3})[name] != before[name]
