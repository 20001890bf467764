"""Tables of stored results, as they stand in the README; `python -m bifocals.report` writes them there."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def attention_table(folder: Path) -> str:
    """The speed of the operator, one line for each stored length."""
    lines = [
        "| tokens | groups a query reads | direction | speed-up | allowed by the pattern | pairs read |",
        "|---|---|---|---|---|---|",
    ]
    for path in sorted(folder.glob("attention*.json")):
        stored = json.loads(path.read_text())
        setting = stored["setting"]
        direction = "forward + backward" if setting["backward"] else "forward"
        reads = f"{setting['top_k']} of {setting['groups']}"
        for row in stored["rows"]:
            if row["groups"] == "balanced":
                lines.append(
                    f"| {row['length']:,} | {reads} | {direction} | {row['speedup']:.1f}x | {row['bound']:.1f}x "
                    f"| {row['pairs_kept']:.0%} |"
                )
    return "\n".join(lines)


def with_tables(readme: str, folder: Path) -> str:
    """The README with its table made anew."""
    block = f"<!-- attention -->\n{attention_table(folder)}\n<!-- /attention -->"
    return re.sub(r"<!-- attention -->.*<!-- /attention -->", lambda _: block, readme, flags=re.DOTALL)


if __name__ == "__main__":
    path = ROOT / "README.md"
    path.write_text(with_tables(path.read_text(), ROOT / "results"))
