"""`treewy models`: shapes, bytes, and what each state method needs per request."""

from __future__ import annotations

import typer

from lab.cli.output import JSON_OPTION, print_json, print_table


def command(
    model: str = typer.Argument(None, help="A shipped model (any letter case) or the path of a config.json."),
    tree: str = typer.Option("2,2,2", "--tree", help="Draft tree for the per-method memory, e.g. 1,1,1 or 2,2,2."),
    tensor_parallel_size: int = typer.Option(1, "--tensor-parallel-size", help="GPUs that share the model."),
    mamba_ssm_cache_dtype: str = typer.Option(
        "auto", "--mamba-ssm-cache-dtype", help="State dtype: auto (the checkpoint's), float32 or bfloat16."
    ),
    as_json: bool = JSON_OPTION,
) -> None:
    """Model shapes: bytes of weights, KV, state; with MODEL also the memory of every state method."""
    from lab.data import model_names
    from lab.shapes import load_shape

    if model is None:
        rows = [_overview(load_shape(name)) for name in model_names()]
        if as_json:
            print_json(rows)
            return
        header = (
            "model",
            "GDN",
            "full",
            "params B",
            "active B",
            "KV B/token bf16",
            "state MiB fp32",
            "conv MiB",
        )
        print_table("", header, [list(row.values()) for row in rows])
        return
    _detail(model, tree, tensor_parallel_size, mamba_ssm_cache_dtype, as_json)


def _overview(shape: object) -> dict[str, object]:
    from lab.shapes import ModelShape
    from lab.units import MIB

    assert isinstance(shape, ModelShape)
    layers = shape.num_linear_layers
    return {
        "model": shape.name,
        "linear_layers": layers,
        "full_layers": shape.num_full_layers,
        "parameters_billion": round(shape.parameters() / 1e9, 2),
        "active_parameters_billion": round(shape.active_parameters() / 1e9, 2),
        "kv_bytes_per_token_bf16": shape.num_full_layers * shape.kv_bytes_per_token_layer("bfloat16"),
        "state_mib_fp32": round(layers * shape.state_bytes_layer("float32") / MIB, 2),
        "conv_mib_bf16": round(layers * shape.conv_bytes_layer() / MIB, 2),
    }


def _detail(model: str, tree_text: str, tp: int, dtype: str, as_json: bool) -> None:
    from lab.errors import InfeasibleError, UsageError
    from lab.methods import METHODS, LayerHeads
    from lab.shapes import load_shape
    from lab.trees import DraftTree, parse_tree
    from lab.units import MIB

    shape = load_shape(model)
    if dtype not in ("auto", "float32", "bfloat16"):
        raise UsageError(f"--mamba-ssm-cache-dtype is '{dtype}'; allowed are auto, float32, bfloat16")
    state_dtype = shape.mamba_ssm_dtype if dtype == "auto" else dtype
    heads = LayerHeads.of(shape, state_dtype, tp)
    tree = parse_tree(tree_text)
    rows = []
    for method in METHODS.values():
        used = DraftTree.chain(0) if method.topology == "decode" else tree
        try:
            method.check_tree(used)
        except InfeasibleError:
            continue
        resident = method.resident_bytes(heads, used)
        rows.append(
            {
                "state_method": method.name,
                "rows": used.num_rows,
                "resident_bytes_per_layer": resident,
                "resident_mib_per_request": round(shape.num_linear_layers * resident / MIB, 2),
                "ratio_to_one_state": round(resident / heads.state_bytes, 3) if heads.state_bytes else 0.0,
            }
        )
    overview = _overview(shape)
    if as_json:
        print_json({**overview, "tree": tree_text, "state_dtype": state_dtype, "methods": rows})
        return
    print_table("", ("field", "value"), [(key.replace("_", " "), value) for key, value in overview.items()])
    typer.echo("")
    title = (
        f"State, records and logs of one running request, tree {tree_text} ({tree.num_rows} rows), "
        f"{state_dtype} state, tensor parallel size {tp}"
    )
    header = ("state method", "rows", "bytes per layer", "MiB per request", "x one state")
    print_table(title, header, [list(row.values()) for row in rows])
