"""The style of a report: one sheet, in the page itself, for light and dark screens."""

from __future__ import annotations

from qlora_fsdp.report.charts import NUM_COLOURS

STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --soft: #6b6b6b; --rule: #dddddd; --paper: #ffffff; --bad: #b3261e;
  --0: #0072b2; --1: #d55e00; --2: #009e73; --3: #cc79a7; --4: #56b4e9; --5: #e69f00; --6: #7a5cc4; --7: #555555; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8e8; --soft: #a0a0a0; --rule: #3a3a3a; --paper: #161616;
  --bad: #ff8a80; --0: #4aa8e0; --7: #aaaaaa; } }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
  max-width: 1120px; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin: 0 0 .6rem; overflow-wrap: anywhere; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
figcaption { color: var(--soft); } figcaption b { color: var(--ink); font-weight: 600; }
.bad { color: var(--bad); white-space: pre-wrap; overflow-wrap: anywhere; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(420px, 1fr)); gap: 1rem; }
@media (max-width: 500px) { .charts { grid-template-columns: 1fr; } }
figure { margin: .8rem 0 0; } svg { width: 100%; height: auto; } svg text { font-size: 11px; fill: var(--soft); }
.grid { stroke: var(--rule); } polyline { fill: none; stroke-width: 1.5; } .faint { opacity: .35; stroke-width: 1; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
td, th { text-align: left; padding: .25rem .9rem .25rem 0; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th { color: var(--soft); font-weight: normal; vertical-align: top; }
.facts td { white-space: pre-wrap; overflow-wrap: anywhere; } .facts { margin-bottom: 1.2rem; }
.facts pre { white-space: pre-wrap; overflow-wrap: anywhere; }
pre { overflow-x: auto; font-size: 13px; margin: .3rem 0; } summary { cursor: pointer; }
.text td { white-space: pre-wrap; vertical-align: top; min-width: 14rem; overflow-wrap: anywhere; }
.key { display: inline-block; width: .8rem; height: .8rem; border-radius: 2px; margin: 0 .4rem 0 .2rem; }
.thin { height: .15rem; vertical-align: middle; }
""" + "".join(
    f".c{i} {{ stroke: var(--{i}); }} circle.c{i} {{ fill: var(--{i}); }} .key.k{i} {{ background: var(--{i}); }}\n"
    for i in range(NUM_COLOURS)
)
