"""predict.py with documents of translators: .po, XLIFF and TMX in, the same with translations."""

import pathlib
import re
import shutil
import subprocess
import types
from typing import Any

import polib
import pytest

from commands.predict import documents, outputs
from commands.predict.model import Request
from common import translator_files
from common.errors import ConfigError, DataError
from tests.commands.predict.test_predict import refusal
from tests.commands.predict.test_sentences import model  # noqa: F401

etree = translator_files.etree()
PO = r"""# Translators: A. N.
msgid ""
msgstr ""
"Project-Id-Version: x 1\n"
"Language: \n"
"Content-Type: text/plain; charset=ISO-8859-1\n"

# by hand
#: a.c:1 b.c:2
msgid   "kept"
msgstr "b" "ehalten"

#. for you
#: a.c:3
#, c-format
#| msgid "old"
msgid ""
"\n"
"Usage: %s [OPTION]\n"
"  -a, --all\tshow {1} all\n"
msgstr ""

#, fuzzy
msgid "guess"
msgstr "geraten"

msgctxt "menu"
msgid "One file"
msgid_plural "%d files"
msgstr[0] ""
msgstr[1] "alle"

msgid "***"
msgstr ""

#~| msgid "g"
#~ msgid "gone"
#~ msgstr ""
# the end
""".replace('"b" "ehalten"', '"behalten"')


def translate(tmp_path, name, content, languages=("en", "de"), every=False, answer=str.upper):
    """The file with `answer` as its translator, which gives "" for an error; the lines it got."""
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    out, seen = tmp_path / f"out.{name}".replace(".pot", ".po"), []
    request = Request([str(tmp_path / name)], "", None, {}, "", "text", str(out), 8, False, {})
    uses: Any = types.SimpleNamespace(languages=languages)
    document = documents.read(request, every, 1, uses)
    assert document

    def rows():
        for line in documents.lines(document):
            seen.append(line.text)
            wrong = "lacks %s" if "%s" in line.text and "%s" not in answer(line.text) else ""
            content = {"translations": [{"text": answer(line.text)}], "placeholders": wrong}
            yield outputs.Row({}, "" if answer(line.text) else "too long", content)

    documents.write(document, rows(), str(out))
    return out.read_bytes(), seen


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_catalog_keeps_every_line_but_what_is_translated(tmp_path, end):
    text = PO.replace("\n", end)
    data, seen = translate(tmp_path, "a.po", text, answer=lambda text: text.replace("%s", "S"))
    assert seen == ["Usage: %s [OPTION]", "-a, --all\tshow {1} all", "One file"]
    new = {*data.decode().split("\n")} - {*text.split("\n")}
    assert {line.strip() for line in new} == {
        r'"Language: de\n"',
        r'"Content-Type: text/plain; charset=UTF-8\n"',
        r'"Plural-Forms: nplurals=2; plural=(n != 1);\n"',
        "# Machine translation: lacks %s",
        "#, fuzzy, c-format",
        r'"Usage: S [OPTION]\n"',
        'msgstr[0] "One file"',
        'msgstr "***"',
    }
    (tmp_path / "b.po").write_bytes(data)
    catalog = polib.pofile(str(tmp_path / "b.po"))
    assert [entry.fuzzy for entry in catalog] == [False, True, True, True, True, False]
    assert catalog[1].msgstr == catalog[1].msgid.replace("%s", "S")
    assert catalog[3].msgstr_plural == {0: "One file", 1: "alle"}
    assert catalog[1].tcomment and catalog[1].previous_msgid == "old"
    if msgfmt := shutil.which("msgfmt"):
        check = [msgfmt, "-c", "-f", "-o", str(tmp_path / "mo"), str(tmp_path / "b.po")]
        assert "a.po" not in subprocess.run(check, capture_output=True, text=True).stderr
    # Translations that are there stay, all without new ones.
    assert translate(tmp_path, "c.po", data)[0] == data
    _, seen = translate(tmp_path, "d.po", data, every=True)
    assert seen[0] == "kept" and "guess" in seen and "gone" not in seen


RUSSIAN = r"nplurals=3; plural=(n%10==1 && n%100!=11 ? 0 : n%10>=2 && n%10<=4 && (n%100<10 || n%1"


@pytest.mark.parametrize(
    ("header", "language", "texts"),
    [
        ("", "de", "One file|%d files"),
        ("", "pt-br", "One file|%d files"),
        ("", "ja", "%d files"),
        ("", "ru", "%d files|%d files|%d files"),  # the first is that of 21, too
        ("nplurals=INTEGER; plural=EXPRESSION;", "cs", "One file|%d files|%d files"),
        ("nplurals=2; plural=(n==1);", "de", "%d files|One file"),
        ("nplurals=2; plural=n/0;", "de", "One file|%d files"),
        # As in files of git and GNOME.
        ("Plural-Forms: nplurals=3; plural=(n==1 ? 0 : 1);", "de", "One file|%d files|%d files"),
    ],
)
def test_plural_forms(tmp_path, header, language, texts):
    field = f'"Plural-Forms: {header}\\n"\n' if header else ""
    text = (
        f'msgid ""\nmsgstr ""\n{field}\nmsgid "One file"\nmsgid_plural "%d files"\nmsgstr[0] ""\n'
    )
    data, _ = translate(tmp_path, "a.pot", text, ("en", language))
    (entry,) = catalog = polib.pofile(data.decode())
    assert entry.msgstr_plural == dict(enumerate(texts.upper().split("|")))
    tags = {"pt-br": "pt_BR"}
    assert catalog.metadata["Language"] == tags.get(language, language)
    if language == "ru":
        assert catalog.metadata["Plural-Forms"].startswith(RUSSIAN)
    if header == "nplurals=2; plural=(n==1);":
        assert catalog.metadata["Plural-Forms"] == header


@pytest.mark.skipif(not shutil.which("msginit"), reason="gettext is not installed")
def test_the_plural_rules_are_those_of_msginit(tmp_path):
    (tmp_path / "a.pot").write_text(
        'msgid ""\nmsgstr ""\n"Content-Type: text/plain; charset=UTF-8\\n"\n\n'
        'msgid "a"\nmsgid_plural "b"\nmsgstr[0] ""\nmsgstr[1] ""\n'
    )
    for language in ("ja", "fr", "pt_BR", "ru", "pl", "cs", "ro", "de"):
        command = ["msginit", "--no-translator", "-i", "a.pot", "-l", language, "-o", "-"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        rule = polib.pofile(done.stdout).metadata["Plural-Forms"]
        assert documents._plural_rule("", language.lower().replace("_", "-"))[0] == rule


XLIFF = """\
<?xml version="1.0" encoding="utf-8" standalone="no"?>
<!-- a comment -->
<xliff version="1.2" xmlns="urn:oasis:names:tc:xliff:document:1.2" xmlns:x="urn:x">
  <file original="a" source-language="en-US" datatype="plaintext"><body>
    <group id="g"><trans-unit id="1" x:own="1">
      <source>Press <g id="1">the <x id="2"/> key</g>.</source>
      <note>for you</note>
    </trans-unit></group>
    <trans-unit id="2" approved="yes"><source>kept</source><target state="final">da</target>
      <alt-trans><source>kept</source><target/></alt-trans></trans-unit>
    <trans-unit id="3" translate="no"><source>NAME</source></trans-unit>
    <trans-unit id="4"><source><![CDATA[two
      words]]></source><target state="new">x</target></trans-unit>
    <trans-unit id="5" xml:space="preserve"><source> a
  b </source></trans-unit>
  </body></file><?pi done?>
</xliff>
"""


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_xliff_keeps_its_xml_but_what_is_translated(tmp_path, encoding):
    text = XLIFF.replace("utf-8", encoding).encode(encoding)
    data, seen = translate(tmp_path, "a.xlf", text)
    assert seen == ["Press {1}the {2} key{/1}.", "two words", "a", "b"]
    root = etree.fromstring(data)
    units = {unit.get("id"): unit for unit in root.iter("{*}trans-unit")}
    first = units["1"].find("{*}target")
    assert first.getprevious().tag.endswith("source")
    inner = re.sub(r' xmlns\S*="\S*?"', "", etree.tostring(first, encoding="unicode").strip())
    state = 'state="needs-review-translation" state-qualifier="mt-suggestion"'
    assert inner == f'<target {state}>PRESS <g id="1">THE <x id="2"/> KEY</g>.</target>'
    assert units["4"].find("{*}target").text == "TWO WORDS"
    assert units["5"].find("{*}target").text == " A\n  B "
    assert root.find("{*}file").get("target-language") == "de"
    for number in "145":  # without what is new, the XML is the same
        target = units[number].find("{*}target")
        target.getprevious().tail = target.tail if number == "1" else target.getprevious().tail
        target.getparent().remove(target)
    del root.find("{*}file").attrib["target-language"]
    before = etree.fromstring(text)
    old = next(before.iter("{*}trans-unit")).getparent().getparent()[3].find("{*}target")
    old.getparent().remove(old)
    assert etree.tostring(root, method="c14n") == etree.tostring(before, method="c14n")
    # Nothing is left to translate; with --all all is, and nothing is approved then.
    assert translate(tmp_path, "b.xlf", data) == (data, [])
    anew = etree.fromstring(translate(tmp_path, "c.xlf", data, every=True)[0])
    second = next(unit for unit in anew.iter("{*}trans-unit") if unit.get("id") == "2")
    assert second.get("approved") == "no" and second.find("{*}target").text == "KEPT"


@pytest.mark.parametrize(
    ("answer", "content"),
    [
        ("{1}a{2}{/1} c", "<g><x/></g>"),
        ("{2}{1}a{/1} c", "<x/><g></g>"),
        ("a {2} c", ""),
        ("{1}a{2}{/1}{/1}", ""),
        ("{/1}a{2}{1}", ""),
    ],
)
def test_codes_come_back_once_or_are_told(tmp_path, answer, content):
    text = "<xliff><trans-unit><source>y <g>b<x/></g> z</source></trans-unit></xliff>"
    root = etree.fromstring(translate(tmp_path, "a.xlf", text, answer=lambda _: answer)[0])
    target, noted = next(root.iter("target")), [*root.iter("note")]
    written = "".join(re.findall("<.*?>", etree.tostring(target).decode())[1:-1])
    assert written == content and bool(noted) == (not content)
    assert "".join(target.itertext()) == re.sub(r"\{/?\d\}", "", answer)


TMX = """<?xml version="1.0"?>
<tmx version="1.4"><header srclang="en"/><body>
<tu tuid="1">
  <tuv xml:lang="EN-us"><seg><bpt i="1">&lt;b&gt;</bpt>Go<ept i="1">&lt;/b&gt;</ept> %s on</seg>
  </tuv>
</tu>
<tu><tuv xml:lang="en"><seg>kept</seg></tuv><tuv xml:lang="de_AT"><seg>da</seg></tuv></tu>
<tu><tuv xml:lang="fr"><seg>autre</seg></tuv></tu>
</body></tmx>"""


def test_a_memory_gets_what_it_lacks_and_keeps_what_people_wrote(tmp_path):
    data, seen = translate(tmp_path, "a.tmx", TMX)
    assert seen == ["Go{2} %s on"]
    (new,) = etree.fromstring(data).xpath("//tuv[@creationid='MT!']")
    assert new.getparent().get("tuid") == "1" and new.values() == ["de", "MT!"]
    assert [node.tag for node in new] == ["note", "seg"]
    assert [node.tag for node in new[-1]] == ["bpt", "ept"] and new[-1][0].tail == "GO"
    again, seen = translate(tmp_path, "b.tmx", data, every=True, answer=str.title)
    assert seen == ["Go{2} %s on"] and b">da<" in again and again.count(b"MT!") == 1
    with pytest.raises(ConfigError, match=r"c\.tmx has no text of es"):
        translate(tmp_path, "c.tmx", TMX, ("es", "de"))
    with pytest.raises(ConfigError, match=r"d\.tmx.*--target_language"):
        translate(tmp_path, "d.tmx", TMX, ("", ""))


def test_text_of_placeholders_alone_stays(tmp_path):
    text = 'msgid ""\nmsgstr ""\n\nmsgid "%s: {name}"\nmsgstr ""\n\nmsgid "%s is here"\nmsgstr ""\n'
    _, seen = translate(tmp_path, "a.po", text)
    assert seen == ["%s is here"]


def test_what_cannot_be_translated_stays_untranslated(tmp_path):
    data, _ = translate(
        tmp_path, "a.po", PO, answer=lambda text: "" if "all" in text else " " * ("file" in text)
    )
    entries = polib.pofile(data.decode())
    assert not entries[1].msgstr and not entries[1].fuzzy and not entries[3].msgstr_plural[0]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.po", PO.replace("Language: ", "Language: fr"), "its target language is fr"),
        ("a.xlf", XLIFF.replace("en-US", "fr-FR"), "its source language is fr-FR"),
        ("a.xlf", '<xliff version="2.0"/>', "is XLIFF 2.0"),
        ("a.po", f'{PO}msgid "a\n', "line 40 has no string"),
        ("a.po", f'{PO}msgid "a"\nmsgid "b"\n', "line 41 is no message"),
        ("a.tmx", "<tmx>", "is damaged"),
    ],
)
def test_faults(tmp_path, name, content, words):
    with pytest.raises((ConfigError, DataError), match=words):
        translate(tmp_path, name, content)


def test_a_model_translates_a_document(call, model, tmp_path):  # noqa: F811
    _, sources, _ = model
    long = "a " * 2100
    entries = (f'msgid "{text}\\n"\nmsgstr ""\n\n' for text in (sources[0], long, sources[1]))
    path, out = tmp_path / "a.po", tmp_path / "b.po"
    path.write_text("".join(entries))
    code, _, err = call(path, f"--out={out}")
    first, fault, last = polib.pofile(out.read_text())
    plain = call(*sources[:2])[1].split("\n")
    assert [first.msgstr, fault.msgstr, last.msgstr] == [f"{plain[0]}\n", "", f"{plain[1]}\n"]
    assert code == 1 and "a.po, line 4: " in err and "3 messages: 2 texts translated" in err
    assert pathlib.Path(path).read_text().count('msgstr ""') == 3


def test_mistakes(model, tmp_path, capsys):  # noqa: F811
    path, out = tmp_path / "a.po", tmp_path / "b.po"
    path.write_text(PO)
    for argv, text in [
        ([path], "a.po is a document"),
        ([path, f"--out={tmp_path}/x.csv"], "with --out=NAME.po"),
        ([path, "x", f"--out={out}"], "give it alone"),
        ([path, f"--out={path}"], "would be overwritten"),
        ([tmp_path / "gone.po", f"--out={out}"], "cannot read"),
        (["x", "--all"], "--all goes with a document"),
    ]:
        assert text in refusal(capsys, *argv, "--workdir=any"), argv
