"""Placeholders: what is one, what is none, and how two texts differ."""

import string
from collections import Counter

import pytest

from common.placeholders import difference, find

FOUND = {
    "%s %d %5.2f %-10s %lu %zu %% %1$s %*d %@ %+d": "%s %d %5.2f %-10s %lu %zu %% %1$s %*d %@ %+d",
    "%(name)s %(n)02d 100%% 7%%": "%(name)s %(n)02d %% %%",
    "%'d %Id %<PRIu64>": "%d %d %<PRIu64>",  # digits are grouped, and are those of the language
    "%1. %L2 of %10s": "%1 %L2 %10",
    "%n file(s)": "%n",
    '<a href="%2">%1</a>': "<a> %2 %1 </a>",
    "{} {0} {name!r:>10} {0:N2} {a.b[0]} { c }": "{} {0} {name!r:>10} {0:N2} {a.b[0]} {c}",
    "{0:yyyy HH}": "{0:yyyyHH}",
    "{{ x|lower }} {{{y}}} {% if z %}": "{{x|lower}} {{{y}}} {%ifz%}",
    "${a.b} %{n} #{0} $NAME$ %PATH% %PRODUCTNAME": "${a.b} %{n} {0} $NAME$ %PATH% %PRODUCTNAME",
    "{{PLURAL:$1|page|pages}}": "{{PLURAL:$1}}",
    '<a href="%s" title=x>b</A> <br/> <br /> <x/>': "<a> %s </a> <br> <br> <x/>",
    "<link>x</link> <0>y</0>": "<link> </link> <0> </0>",
    "&amp; &#60; &#160; &nbsp; &times; &kde;": "&amp; &#60; &#160; &nbsp; &times; &kde;",
    "{n, plural, =0 {none} one {# by {who}} other {# <b>x</b>}}": "{n,plural} # {who} <b> </b>",
    "{g, select, male {he} other {{n, plural, other {#}}}}": "{g,select,male_other} {n,plural} #",
    "{when, date, short} {n, number}": "{when,date} {n,number}",
}
NONE = """\
100 % sure|50% of|100%ige|50%-a 50%-es|20%-30%|%50'si|5 %.|it is 5%, 6%; 7%|{ alone|a } b {
{1, 2, 3}|{see below}|{Note: see below}|a < b and c > d|a<b and c>d|i <3 u|<me@x.org>|<http://x.de>
AT&T; x|R&D;|Q&A|$5 and $6|US$|x_i < 5% & y|say <file>|<Control>a|&quot;x&quot;|&laquo;x&raquo;
&#39;x&#8217;|a &mdash; b&hellip;|&#220;ber &uuml;ber
http://x.de/%C3%BC%20d?a=%d0|%H:%M %p|%Y-%m-%d|\\{x\\}|""".replace("\n", "|").split("|")
DIFFER = [
    ("%s", "% s", "lacks %s"),
    ("%d of %s", "%s", "lacks %d"),
    ("{name}", "{Name}", "lacks {name}, adds {Name}"),
    ("{name}", "{name}}", "adds a brace"),
    ("a {} {", "a {}", "lacks a brace"),
    ("{name}", "{ name }", "lacks {name}, adds { name }"),
    ("%(n)d", "%(n) d", "lacks %(n)d"),
    ("%5.2f", "%5,2f", "lacks %5.2f"),
    ("<b>x</b>", "<b>x", "lacks </b>"),
    ("a &amp; b", "a & b", "lacks &amp;"),
    ("5&nbsp;km <i>", "5 km", "lacks &nbsp; <i>"),
    ("x", "%1", "adds %1"),
    ("%1 to %2", "auf %2", "lacks %1"),
    ("{} {}", "{1} {1}", "lacks {} {}, adds {1} {1}"),
    ("%s %d", "%1$d %2$s", "lacks %s %d, adds %1$d %2$s"),
    ("{n, plural, one {#} other {#}}", "{n, plural, eine {#} andere {#}}", "lacks {n, plural} #"),
    ("{n, plural, one {#} other {#}}", "{n, plural, one {#} other {#}", "lacks {n, plural} #"),
    ("{n, plural, other {# {a}}}", "{n, plural, other {{a}}}", "lacks #"),
    ("{g, select, a {x} other {}}", "{g, select, b {x} other {}}",
     "lacks {g, select, a other}, adds {g, select, b other}"),
    ("%s" * 7, "", "lacks %s %s %s %s and 3 more"),
]  # fmt: skip
AGREE = [
    ("%s of %d", "%d von %s"),
    ("%s of %d", "%2$d von %1$s"),
    ("%s of %<PRIu64>", "%2$<PRIu64> von %1$s"),
    ("{} of {}", "{1} von {0}"),
    ("%5d {:>5}", "%1$5d {0:>5}"),
    ("{{ x }}<br/>", "{{x}}<br>"),
    ("{n, plural, one {#} other {# {a}}}", "{n, plural, one {# {a}} few {#} other {# {a}}}"),
    ('<a title="new">x</a>', '<a title="neu">y</a>'),
    ("write <file>", "<datei> schreiben"),
    ("%I:%M %p", "%H:%M"),
    ("50% of", "%50'si"),
    ("it&#8217;s &ldquo;on&rdquo;", "es ist &#8222;an&#8220;"),
    ("%1% of ${0}", "%%1 von {0} $"),
]


@pytest.mark.parametrize("text", FOUND)
def test_the_kinds(text):
    found = ["".join(each.split()) for each in find(text).elements()]
    expected = [each.replace("_", "") for each in FOUND[text].split()]
    assert Counter(found) == Counter(expected)


@pytest.mark.parametrize("text", NONE)
def test_ordinary_text_has_none(text):
    assert not find(text)


@pytest.mark.parametrize(("source", "translation", "text"), DIFFER)
def test_damage_is_told(source, translation, text):
    assert difference(source, translation) == text
    assert bool(difference(translation, source))


@pytest.mark.parametrize(("source", "translation"), AGREE)
def test_what_languages_may_change(source, translation):
    assert difference(source, translation) == difference(translation, source) == ""


def test_french_has_more_blanks():
    assert difference("Page: %s", "Page&nbsp;: %s") == ""


def test_braces_are_those_of_python():
    text = "{} {0} {a} {a.b} {a[0].c} {x!r} {y!s:>10} {z:.3f} {n:,} {0:%Y}"
    own = [
        f"{{{name}{'!' + how if how else ''}{':' + form if form else ''}}}"
        for _, name, form, how in string.Formatter().parse(text)
        if name is not None
    ]
    assert find(text) == Counter(own)


def test_conversions_are_those_of_python():
    """Python refuses a wrong number of values."""
    text = "%s, %-5d: %5.2f%%; %x/%r %+d (%%) %.3e%c"
    found = [each for each in find(text).elements() if each != "%%"]
    values = tuple("a" if each[-1] in "sr" else 1 for each in found)
    assert text % values and find(text)["%%"] == text.count("%%")
    with pytest.raises(TypeError):
        _ = text % values[1:]


@pytest.mark.parametrize(
    "part", ["{", "{ ", "{a, plural, other {", "<a x=\"", "<x>", "%(", "http://", "&a", "%1111"]
)  # fmt: skip
def test_long_damaged_text_is_read(part):
    assert not find(part * 20_000)
