"""How the page looks, and the few lines that draw its figures. Colours follow the reader's light or dark screen."""

STYLE = """
:root { color-scheme: light dark; --ink: #1d2329; --dim: #626b75; --line: #dfe3e8; --paper: #ffffff; --bad: #a4360b; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e7eb; --dim: #9aa3ad; --line: #363d46; --paper: #14181d; --bad: #f0975c; }
}
body { font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; color: var(--ink);
  background: var(--paper); max-width: 1180px; margin: 0 auto; padding: 28px 24px 60px; }
h1 { font-size: 28px; line-height: 1.25; margin: 0 0 6px; }
h2 { font-size: 21px; margin: 40px 0 8px; padding-top: 18px; border-top: 1px solid var(--line); }
h3 { font-size: 16px; margin: 26px 0 6px; }
p { max-width: 78ch; margin: 8px 0; }
.dim, figcaption { color: var(--dim); font-size: 14px; }
.figures { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 18px 32px; margin: 18px 0; }
@media (max-width: 900px) { .figures { grid-template-columns: minmax(0, 1fr); } }
figure { margin: 0; min-width: 0; }
figcaption { font-weight: 600; color: var(--ink); font-size: 15px; margin-bottom: 4px; }
.plot { width: 100%; overflow-x: auto; }
.plot svg { display: block; }
.plot svg text { fill: var(--ink); }
.plot svg .role-axis-grid line { stroke: var(--line); }
.plot svg .role-axis-domain line, .plot svg .role-axis-tick line { stroke: var(--dim); }
.plot svg .guess_marks line { stroke: var(--dim); }
.plot svg .paper_marks text { fill: var(--paper); stroke: var(--paper); }
.plot.vega-embed summary { opacity: 0.15; }
.plot.vega-embed:hover summary { opacity: 0.7; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { padding: 5px 16px 5px 0; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
thead th { color: var(--dim); font-weight: 600; vertical-align: bottom; }
thead th[title] { text-decoration: underline dotted; text-underline-offset: 3px; cursor: help; }
th:first-child, td.words { text-align: left; }
th:last-child, td:last-child { padding-right: 4px; }
code { font: 13px ui-monospace, "SF Mono", Menlo, Consolas, monospace; overflow-wrap: anywhere; }
ul { padding-left: 22px; margin: 6px 0; }
li b { font-weight: 600; }
.bad { color: var(--bad); }
details { margin: 14px 0; }
section > details > summary { cursor: pointer; font-weight: 600; }
dl { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: 3px 18px; font-size: 14px; margin: 8px 0 16px; }
dt { color: var(--dim); }
dd { margin: 0; overflow-wrap: anywhere; }
"""

# Told to the reader where a figure cannot be drawn; the console has the rest.
DRAW = """
for (const plot of document.querySelectorAll("[data-figure]")) {
  const spec = JSON.parse(document.getElementById(plot.dataset.figure).textContent);
  const actions = { export: true, source: false, compiled: false, editor: false };
  vegaEmbed(plot, spec, { renderer: "svg", actions }).catch((error) => {
    plot.textContent = "This figure could not be drawn: " + error.message;
    console.error(error);
  });
}
"""

# Nothing may be fetched, from anywhere: what the page needs is in it. Vega turns its expressions into functions, hence eval.
POLICY = "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; img-src data: blob:"
