"""Write a report of one or several runs: one HTML file that works offline, or Markdown with PNGs.

    python tools/report.py RUN [RUN ...] [--format html|md] [--output FILE]

RUN is the folder of a run, such as runs/demo. The curves of several runs are overlaid. By default, the report of one
run is RUN/report.html, and that of several runs is report.html in the working directory. docs/report.md has the rest.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # use this checkout, whatever is installed
from rl.common.files import write_atomically
from rl.common.text import format_bytes
from rl.report.page.build import build_page
from rl.report.page.html import to_html
from rl.report.page.markdown import to_markdown
from rl.report.page.read import ReportError, read_runs

MAX_COUNT = 1000  # bounds the memory of a report


def choose_output(output: Path | None, runs: list[Path], ending: str) -> Path:
    if output is None:
        output = (runs[0] if len(runs) == 1 else Path()) / f"report{ending}"
    if output.is_dir():
        raise ReportError(
            f"--output: {output} is a folder. Give the name of a file, such as {output / 'report'}{ending}"
        )
    return output


def count(text: str) -> int:
    if not text.isdecimal() or int(text) > MAX_COUNT:
        raise argparse.ArgumentTypeError(f"got {text!r}; give a whole number from 0 to {MAX_COUNT}")
    return int(text)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="the folder of a run")
    parser.add_argument("--format", choices=["html", "md"], default="html", help="default: html")
    parser.add_argument("--output", type=Path, metavar="FILE", help="the file to write")
    parser.add_argument("--window", type=count, default=0, metavar="N", help="steps in the running mean; 0: by length")
    parser.add_argument("--samples", type=count, default=4, metavar="N", help="prompts per set with their responses")
    args = parser.parse_args(arguments)
    try:
        output = choose_output(args.output, args.runs, f".{args.format}")
        page = build_page(read_runs(args.runs, args.window), args.samples)
        if args.format == "html":
            files = {output.name: to_html(page).encode()}
        else:
            text, pictures = to_markdown(page, output.stem)
            files = {output.name: text.encode(errors="replace"), **pictures}
        for name, data in files.items():
            write_atomically(output.with_name(name), data)
    except ReportError as error:
        raise SystemExit(f"report: {error}") from None
    except OSError as error:
        place = error.filename or args.output
        raise SystemExit(
            f"report: cannot write {place}: {error.strerror}. Give a file in a folder that exists and can be written "
            "with --output"
        ) from None
    pictures_too = f", and {len(files) - 1} PNGs" if len(files) > 1 else ""
    print(f"{output}: {format_bytes(len(files[output.name]))}{pictures_too}")


if __name__ == "__main__":
    main()
