"""The table of translations for people, and that for programs."""

from benchmarks.translation import use

ROWS = [
    ("on 3 May", "am 3. Mai", "am 3. Mai"),
    ("at noon", "mittags", "um zwölf Uhr"),
    ("two\tthings\nhere", "", "zwei Dinge"),
]


def test_exact_translations_are_marked_and_not_repeated():
    assert use.table(ROWS, 2) == (
        "  source       on 3 May\n"
        "= translation  am 3. Mai\n"
        "\n"
        "  source       at noon\n"
        "! translation  mittags\n"
        "  reference    um zwölf Uhr\n"
        "\n"
        "1 of 3 translations equal their reference (=); the first 2 are above\n"
    )
    assert "! translation\n  reference    zwei Dinge\n" in use.table(ROWS, 9)
    assert use.table(ROWS, 3) == use.table(ROWS, 9)
    assert use.table(ROWS, 3).endswith("\n\n1 of 3 translations equal their reference (=)\n")
    assert use.table([], 5) == "0 of 0 translations equal their reference (=)\n"


def test_long_sentences_go_on_below_themselves():
    text = use.table([("word " * 60, "Wort" * 60, "x")], 1)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 100
    assert sum(line.count("word") for line in lines) == 60
    assert sum(line.count("W") for line in lines) == 60
    assert lines[1].startswith(" " * 15 + "word")


def test_the_file_for_programs_has_a_line_for_each_sentence():
    lines = use.tsv(ROWS).decode().split("\n")
    assert lines == [
        "source\ttranslation\treference\texact",
        "on 3 May\tam 3. Mai\tam 3. Mai\t1",
        "at noon\tmittags\tum zwölf Uhr\t0",
        "two things here\t\tzwei Dinge\t0",
        "",
    ]
