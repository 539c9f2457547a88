"""Colors and style of the page of `tfdist report`, for light and dark screens."""

COLORS = {
    "light": {
        "back": "#ffffff",
        "box": "#f3f5f7",
        "text": "#1b1f24",
        "soft": "#545d68",
        "line": "#c9d1d9",
        "bad": "#b3261e",
        "c1": "#0b62c4",
        "c2": "#a84b00",
        "c3": "#17724f",
        "c4": "#96348a",
        "c5": "#6f5500",
        "c6": "#5a5f66",
        "c7": "#b3261e",
        "c8": "#4a4cb8",
        "c9": "#006a78",
    },
    "dark": {
        "back": "#0e1116",
        "box": "#1a1f27",
        "text": "#e8edf2",
        "soft": "#a6b0bb",
        "line": "#3d4652",
        "bad": "#ff9a91",
        "c1": "#6cb2ff",
        "c2": "#ffab5e",
        "c3": "#5fd6a4",
        "c4": "#f09ae0",
        "c5": "#e0c25a",
        "c6": "#aab2bb",
        "c7": "#ff9a91",
        "c8": "#b1b3ff",
        "c9": "#62d5e3",
    },
}
"""Colors by name. Each has a contrast of 4.5 to `back`, and of 4.5 to `box`; `line` is for decoration only."""

LINES = ("c1", "c2", "c3", "c4", "c5", "c8")
"""Names of the colors of lines in charts."""


def _variables(scheme: str) -> str:
    return "".join(f"--{name}:{color};" for name, color in COLORS[scheme].items())


_SCHEMES = f"""
:root{{color-scheme:light dark;{_variables("light")}}}
@media (prefers-color-scheme:dark){{:root{{{_variables("dark")}}}}}
"""
_RULES = """
*{box-sizing:border-box}
body{margin:0 auto;padding:1rem;max-width:90rem;background:var(--back);color:var(--text);
font:1rem/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;overflow-wrap:anywhere}
h1{font-size:1.4rem;line-height:1.25;margin:.25rem 0 .75rem}
h2{font-size:1.2rem;margin:2.25rem 0 .5rem;padding-top:.5rem;border-top:1px solid var(--line)}
h3{font-size:1rem;margin:1.25rem 0 .25rem}
p,ul,dl{margin:.5rem 0;max-width:80ch}
ul{padding-left:1.25rem}
li{margin:.35rem 0}
a{color:var(--c1)}
.soft{color:var(--soft)}
.bad{color:var(--bad);font-weight:600}
.box{background:var(--box);border:1px solid var(--line);border-radius:.5rem;padding:.75rem 1rem}
.box h2{border:0;margin:.25rem 0;padding:0}
.lead{font-size:1.1rem;font-weight:600}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(9.5rem,1fr));gap:.5rem;margin:.75rem 0;max-width:none}
.tiles div{background:var(--back);border:1px solid var(--line);border-radius:.4rem;padding:.4rem .6rem}
.tiles dt{font-size:.85rem;color:var(--soft)}
.tiles dd{margin:0;font-size:1.25rem;font-weight:600}
nav ul{display:flex;flex-wrap:wrap;gap:.25rem 1rem;list-style:none;padding:0;max-width:none}
nav li{margin:0}
.scroll{overflow-x:auto;max-width:100%;margin:.75rem 0}
table{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums}
caption{text-align:left;font-weight:600;padding:.25rem 0;position:sticky;left:0;max-width:calc(100vw - 2rem)}
th,td{text-align:right;padding:.25rem .6rem;border-bottom:1px solid var(--line);vertical-align:top;
overflow-wrap:normal}
thead th{color:var(--soft);font-weight:600}
th:first-child{text-align:left}
td{white-space:nowrap}
thead th{min-width:4.5rem}
th[scope=row]{min-width:6.5rem}
pre{overflow-x:auto;background:var(--box);border:1px solid var(--line);border-radius:.4rem;padding:.6rem;
font-size:.8rem;line-height:1.4;overflow-wrap:normal}
code{font-size:.9em}
summary{cursor:pointer;padding:.25rem 0}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,24rem),1fr));gap:1rem}
figure{margin:0}
figcaption{font-weight:600;font-size:.95rem}
.chart svg{display:block;width:100%;max-width:44rem;height:auto}
.chart svg *{stroke-linejoin:round;stroke-linecap:butt}
.chart text{font-family:system-ui,-apple-system,"Segoe UI",Roboto,Arial,sans-serif!important}
.bar{display:flex;height:1.4rem;gap:2px;margin:.15rem 0 .6rem}
.bar i{display:block;min-width:0}
.legend{display:flex;flex-wrap:wrap;gap:.2rem 1rem;list-style:none;padding:0;font-size:.9rem;max-width:none}
.legend li{margin:0;display:flex;align-items:center;gap:.4rem}
.legend i{width:1rem;height:1rem;flex:none}
.lane{position:relative;height:1.5rem;margin:.1rem 0 .6rem;background:var(--box);border-radius:.2rem}
.lane i{position:absolute;top:.25rem;bottom:.25rem;background:var(--c1);border-radius:.15rem;min-width:3px}
.lane i.failed{background:var(--c6)}
.lane b{position:absolute;transform:translateX(-50%);line-height:1.5rem;font-size:1rem}
.lane b.cross{color:var(--bad);text-shadow:0 0 2px var(--back),0 0 2px var(--back)}
.lane s{position:absolute;top:0;width:2px;bottom:0;background:var(--text);text-decoration:none}
.axis{display:flex;justify-content:space-between;font-size:.85rem;color:var(--soft)}
.lost{background-image:repeating-linear-gradient(45deg,transparent 0 3px,var(--back) 3px 5px)}
footer{margin-top:2.5rem;border-top:1px solid var(--line);font-size:.9rem;color:var(--soft)}
@media print{body{max-width:none}.scroll{overflow:visible}}
"""
STYLE = _SCHEMES + _RULES
