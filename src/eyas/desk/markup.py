"""How the report page looks: its style sheet, and its parts as HTML. Everything is escaped here."""

import html
from collections.abc import Iterable, Sequence

CSS = """
:root{color-scheme:light dark;--ink:#22282c;--soft:#5b666e;--line:#dcdad5;--back:#f4f2ee;
--card:#fcfbf9;--c0:#1b6e8a;--c1:#c4621a;--c2:#66782a;--c3:#7b57a4;--c4:#8c8579;
--sans:system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;
--serif:"Iowan Old Style","Palatino Linotype",Palatino,"Book Antiqua",Georgia,serif}
@media (prefers-color-scheme:dark){:root{--ink:#e4e7e9;--soft:#a0abb2;--line:#343d43;
--back:#12171a;--card:#1a2024;--c0:#63b8d6;--c1:#eb9a58;--c2:#afc168;--c3:#bda0e4;--c4:#a39c8f}}
*{box-sizing:border-box}html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--back);color:var(--ink);font:1rem/1.6 var(--sans)}
main{max-width:66rem;margin:0 auto;padding:3rem 1.25rem 5rem}
h1,h2{font-family:var(--serif);font-weight:600;line-height:1.2;text-wrap:balance}
h1{font-size:clamp(1.9rem,5vw,2.9rem);margin:0 0 .6rem}
h2{font-size:1.6rem;margin:3.5rem 0 .4rem;padding-top:1.4rem;border-top:1px solid var(--line)}
h3{font-size:1rem;margin:0 0 .3rem}
p{margin:.4rem 0 1rem;max-width:44rem}.lead{font-size:1.15rem}
.kicker,.note,figcaption,caption,summary,footer{color:var(--soft);font-size:.9rem}
.kicker{margin:0 0 .5rem;letter-spacing:.04em}
.note{border-left:3px solid var(--c1);padding-left:.8rem}
code{font:.88em ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;overflow-wrap:anywhere}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(9.5rem,1fr));gap:.75rem;
list-style:none;padding:0;margin:1.8rem 0}
.cards li,figure,.flow li,.side,details{background:var(--card);border:1px solid var(--line);
border-radius:.6rem}
.cards li{padding:.9rem 1rem}.cards li:first-child{border-color:var(--c0)}
.cards b{display:block;font:600 2rem/1.15 var(--serif);font-variant-numeric:lining-nums}
.cards li:first-child b{color:var(--c0)}
.cards span{display:block;font-size:.9rem;line-height:1.35;margin-top:.2rem}
.cards small{display:block;color:var(--soft);font-size:.8rem;line-height:1.35;margin-top:.3rem}
.flow{display:grid;grid-template-columns:repeat(auto-fit,minmax(6.6rem,1fr));
gap:.6rem 1.3rem;list-style:none;padding:0;margin:1rem 0}
.flow li{position:relative;padding:.5rem .7rem}
.flow li:not(:last-child)::after{content:"\\2192" / "";position:absolute;right:-1.17rem;top:50%;
transform:translateY(-50%);color:var(--soft)}
.flow b,.flow span{display:block;line-height:1.3}.flow span{font-size:.85rem}
.flow small{color:var(--soft);font-size:.75rem}
.columns{columns:2 25rem;column-gap:1rem;margin:1.2rem 0}
figure,.side{margin:0 0 1rem;padding:1rem;break-inside:avoid}figcaption{line-height:1.45}
.plot{display:block;width:100%;height:auto}.plot text{font-family:var(--sans)!important}
.plot *{stroke-linejoin:round;stroke-linecap:butt}
.wide{overflow-x:auto;margin:1.2rem 0}
table{border-collapse:collapse;width:100%;font-size:.92rem;font-variant-numeric:tabular-nums}
caption{text-align:left;padding-bottom:.5rem}
th,td{padding:.42rem .7rem;border-bottom:1px solid var(--line);text-align:right;
white-space:nowrap}
thead th{color:var(--soft);font-weight:500;vertical-align:bottom;white-space:normal}
th:first-child{text-align:left;padding-left:0;position:sticky;left:0;background:var(--back)}
tbody th{font-weight:500}
tbody tr.total th,tbody tr.total td{border-top:2px solid var(--line);font-weight:600}
details{padding:.6rem 1rem;margin:1rem 0}details th:first-child{background:var(--card)}
summary{cursor:pointer}
.facts{margin:0;font-size:.92rem}.facts div{display:flex;justify-content:space-between;
gap:1rem;padding:.32rem 0;border-bottom:1px solid var(--line)}.facts div:last-child{border:0}
.facts dd{margin:0;flex:none;max-width:60%;text-align:right;overflow-wrap:anywhere;
font-variant-numeric:tabular-nums}
.facts dt{color:var(--soft)}
.terms dt{font-weight:600}.terms dd{margin:0 0 .8rem;max-width:44rem;color:var(--soft)}
footer{margin-top:4rem;border-top:1px solid var(--line);padding-top:1rem}
@media (max-width:40rem){main{padding-top:1.6rem}th,td{padding:.4rem .5rem}
tbody th:first-child{white-space:normal;overflow-wrap:anywhere;min-width:7rem;max-width:9rem}
figure,.side{padding:.7rem .6rem}figcaption{padding:0 .3rem}}
@media print{body{background:none}figure,tr{break-inside:avoid}}
"""
TOTAL = "all"  # the first cell of a row that sums the others


def page(title: str, body: Iterable[str]) -> str:
    """Return a whole document that asks nobody for anything."""
    inner = "\n".join(part for part in body if part)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
        f'<title>{_escape(title)}</title><link rel="icon" href="data:,">\n'
        f"<style>{CSS}</style></head>\n<body><main>\n{inner}\n</main></body></html>\n"
    )


def heading(level: int, text: str) -> str:
    """Return a heading."""
    return f"<h{level}>{_escape(text)}</h{level}>"


def paragraph(text: str, kind: str = "") -> str:
    """Return a paragraph; words between backticks are code."""
    pieces = _escape(text).split("`")
    inner = "".join(f"<code>{p}</code>" if i % 2 else p for i, p in enumerate(pieces))
    return f'<p class="{kind}">{inner}</p>' if kind else f"<p>{inner}</p>"


def note(text: str) -> str:
    """Return a paragraph that says what is missing or odd."""
    return paragraph(text, "note")


def cards(items: Iterable[tuple[str, str, str]]) -> str:
    """Return big figures: value, what it is, and what it rests on."""
    inner = "".join(
        f"<li><b>{_escape(big)}</b><span>{_escape(what)}</span><small>{_escape(small)}</small></li>"
        for big, what, small in items
    )
    return f'<ul class="cards">{inner}</ul>'


def flow(items: Iterable[tuple[str, str, str]]) -> str:
    """Return the pipeline as a row of boxes: count, what is counted, and the stage behind it."""
    inner = "".join(
        f"<li><b>{_escape(count)}</b><span>{_escape(what)}</span><small>{_escape(stage)}</small></li>"
        for count, what, stage in items
    )
    return f'<ol class="flow">{inner}</ol>'


def facts(title: str, pairs: Iterable[tuple[str, str]]) -> str:
    """Return a box of names and values."""
    inner = "".join(
        f"<div><dt>{_escape(name)}</dt><dd>{_escape(value)}</dd></div>" for name, value in pairs
    )
    return f'<div class="side">{heading(3, title)}<dl class="facts">{inner}</dl></div>'


def terms(pairs: Iterable[tuple[str, str]]) -> str:
    """Return a list of terms and what they mean."""
    inner = "".join(f"<dt>{_escape(t)}</dt><dd>{_escape(d)}</dd>" for t, d in pairs)
    return f'<dl class="terms">{inner}</dl>'


def table(caption: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; the first cell heads its row, and one that reads `all` marks the total."""
    head = "".join(f'<th scope="col">{_escape(h)}</th>' for h in headings)
    body = ""
    for name, *cells in rows:
        kind = ' class="total"' if name == TOTAL else ""
        inner = "".join(f"<td>{_escape(cell)}</td>" for cell in cells)
        body += f'<tr{kind}><th scope="row">{_escape(name)}</th>{inner}</tr>'
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{_escape(caption)}"><table>'
        f"<caption>{_escape(caption)}</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )


def folded(title: str, inner: str) -> str:
    """Return a part that is closed until somebody opens it."""
    return f"<details><summary>{_escape(title)}</summary>{inner}</details>"


def figure(title: str, svg: str, caption: str) -> str:
    """Return a plot in a box."""
    text = f"<figcaption>{_escape(caption)}</figcaption>"
    return f"<figure>{heading(3, title)}{svg}{text}</figure>"


def columns(boxes: Iterable[str]) -> str:
    """Return boxes in as many columns as fit."""
    return f'<div class="columns">{"".join(boxes)}</div>'


def footer(text: str) -> str:
    """Return the end of the page."""
    return f"<footer>{paragraph(text)}</footer>"


def _escape(text: str) -> str:
    return html.escape(text, quote=True)
