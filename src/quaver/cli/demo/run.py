"""The demo from beginning to end."""

from __future__ import annotations

import copy
import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from quaver.cli.demo.corpus import make_corpus, read_text
from quaver.cli.demo.devices import find_devices, start_devices
from quaver.cli.demo.evaluate import Step
from quaver.cli.demo.measure import measure, measure_full
from quaver.cli.demo.model import check_installed, load_model
from quaver.cli.demo.options import DemoOptions
from quaver.cli.demo.report import print_report
from quaver.cli.demo.result import DemoResult, write_json
from quaver.cli.demo.split import place


def run_demo(options: DemoOptions) -> list[DemoResult]:
    """Measure a model in full precision and with recipes, on one device and split; print tables.

    What is wrong with the options raises CommandError, as far as possible before the slow part.
    """
    started = time.perf_counter()
    recipes = options.recipe_names()
    text = read_text(options.text)
    options.check_json()
    check_installed(options.model)
    names = find_devices(options.devices)
    stderr = Console(file=sys.stderr)
    with stderr.status("starting the devices"):
        devices = start_devices(names)
    with stderr.status("loading the model"):
        language = load_model(options.model)
        corpus = make_corpus(text, language.encode, language.context)
        places = place(language.model, devices)
        first = next(iter(places.values()))
    with _progress(stderr) as progress:

        def stage(name: str, steps: int) -> Step:
            task = progress.add_task(name, total=steps)
            return lambda: progress.advance(task)

        model = language.model.to(first)
        baseline = measure_full(model, corpus, first, stage)
        model.to("cpu")  # the peaks of the devices are those of one recipe's model
        results = []
        for i, recipe in enumerate(recipes, start=1):
            # Each recipe gets a model that no other has rounded; the last one needs no copy.
            own = model if i == len(recipes) else copy.deepcopy(model)
            results.append(measure(own, recipe, baseline, corpus, places, stage))
            del own
    screen = Console()
    screen.print(f"{language.name}, {time.perf_counter() - started:.0f} s", markup=False)
    print_report(results, screen)
    if options.json is not None:
        write_json(results, options.json)
        screen.print(f"written to {options.json}", markup=False, soft_wrap=True)
    return results


def _progress(console: Console) -> Progress:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    return Progress(*columns, TimeElapsedColumn(), console=console)
