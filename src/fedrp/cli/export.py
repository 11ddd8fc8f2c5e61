"""Commands that use a trained model elsewhere: write it to a file, have it predict."""

import dataclasses
import json
from pathlib import Path

import click

from fedrp.cli.common import DATA_DIR_OPTION, cli, path_or_none

_FOLDER = click.argument("run", type=click.Path(path_type=Path))
_MODEL = click.option("--model", help="what builds a model of your own: FILE.py:NAME or module:NAME")


@cli.command()
@_FOLDER
@click.option("--to", "target", required=True, type=click.Path(path_type=Path), help="FILE.safetensors, .pt2 or .onnx")
@_MODEL
@click.option("--like", type=click.Path(path_type=Path), help="npz file with inputs x, for programs of your own models")
@DATA_DIR_OPTION
def export(run: Path, target: Path, model: str | None, like: Path | None, data_dir: str | None) -> None:
    r"""Write the model of the finished RUN to a file that other programs read.

    \b
    .safetensors  weights by name, for PyTorch and the class of the model
    .pt2          a program for PyTorch alone (torch.export)
    .onnx         the same for ONNX Runtime and others
    """
    from fedrp.exporting import predicting
    from fedrp.exporting.delivered import of_run
    from fedrp.exporting.formats import require_format, write_model

    require_format(target)
    delivered = of_run(run, model, path_or_none(data_dir))
    if like is not None and delivered.shape is None:
        shape, whole = predicting.like(like)
        delivered = dataclasses.replace(delivered, shape=shape, whole=whole)
    write_model(delivered, target)
    print(f"{target}: {target.stat().st_size:,} bytes")


@cli.command()
@_FOLDER
@click.argument("data", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="file for predictions: .npz or .csv")
@_MODEL
@DATA_DIR_OPTION
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
def predict(run: Path, data: Path, output: Path | None, model: str | None, data_dir: str | None, as_json: bool) -> None:
    """What the model of the finished RUN says of DATA, an npz file with inputs x and, if there are, labels y."""
    from fedrp.exporting.delivered import of_run
    from fedrp.exporting.predicting import predictions, read_examples, require_suffix, write_predictions

    if output is not None:
        require_suffix(output)
    delivered = of_run(run, model, path_or_none(data_dir))
    examples, labelled = read_examples(data, delivered)
    found = predictions(delivered, examples, labelled)
    if output is not None:
        write_predictions(found, delivered.labels, output)
    about = found.summary()
    if as_json:
        print(json.dumps({**about, "output": str(output) if output else None}))
        return
    print(f"{about['examples']:,} examples" + ("" if found.accuracy is None else f", {found.accuracy:.2f} % right"))
    for name, count in about.get("classes", {}).items():
        print(f"class {name}: {count:,}")
    print(f"predictions: {output}" if output else "to keep what it says of each: -o FILE.npz or FILE.csv")
