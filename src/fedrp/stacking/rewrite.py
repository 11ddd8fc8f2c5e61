"""Rewriter: turns a module made of known layers into a function of the stacked parameters of k models.

`torch.fx` writes down what the module's `forward` does; each step of it is looked up in the tables of layers and
functions. `require_same` compares the whole with the module itself on a few examples.
"""

import functools
import warnings
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from fedrp.errors import first_line
from fedrp.stacking.functions import FUNCTIONS, IMAGE_FUNCTIONS, MAX_POOLING, METHODS, RELU
from fedrp.stacking.layers import IMAGE_LAYERS, LAYERS, WITH_RELU
from fedrp.stacking.values import NotStackableError, Pass, Stacked

_EXAMPLES = 3  # that a rewritten module is compared with its original on
_RANDOM_LAYERS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d)


class _Step(NamedTuple):
    """A line of the program: where its result goes, what computes it, and what nobody needs after it."""

    node: fx.Node
    run: Any  # (pass, *arguments, **options) -> value
    forget: tuple[fx.Node, ...]


@dataclass(frozen=True)
class Program:
    """A module as a function of the stacked parameters of k models.

    Guarantees: each model's outputs are those of the module with its parameters, up to rounding, and depend on no other
    model and on no padding of the batch.
    """

    steps: tuple[_Step, ...]
    input: fx.Node
    output: fx.Node
    draws: bool  # whether there is dropout in it
    takes_image: bool  # whether its first layer wants an image

    def __call__(self, now: Pass, x: Stacked) -> torch.Tensor:
        """The outputs of all models, (k, batch, ...)."""
        known: dict[fx.Node, Any] = {self.input: x}
        for node, run, forget in self.steps:
            arguments = fx.node.map_arg(node.args, known.__getitem__)
            known[node] = run(now, *arguments, **fx.node.map_arg(node.kwargs, known.__getitem__))
            for old in forget:
                del known[old]
        result = known[self.output]
        if not isinstance(result, Stacked):
            raise NotStackableError(f"the model returns a {type(result).__name__}")
        return result.rows()


def rewritten(module: nn.Module) -> Program:
    """The program of a module.

    Raises:
        NotStackableError: the module has parts that are not known.
    """
    for name, layer in module.named_modules():
        if layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks:
            raise NotStackableError(f"layer '{name}' ({type(layer).__name__}) has hooks")
        if isinstance(layer, nn.MultiheadAttention) and layer.dropout:  # torch draws it in an order of its own
            raise NotStackableError(f"layer '{name}' (MultiheadAttention) has dropout of attention weights")
    modes = {name: layer.training for name, layer in module.named_modules()}
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    try:
        graph = _traced(module.train())
        changed = [name for name, buffer in module.named_buffers() if not torch.equal(buffer, before[name])]
    finally:
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                buffer.copy_(before[name])
        for name, layer in module.named_modules():
            layer.training = modes[name]
    if changed:
        raise NotStackableError(f"buffer '{changed[0]}' changes while the model runs")
    return _program(module, graph)


class _Tracer(fx.Tracer):
    """Writes down layers of torch as one step each, whatever they are."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return bool(module_qualified_name) and super().is_leaf_module(m, module_qualified_name)


def _traced(module: nn.Module) -> fx.Graph:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _Tracer().trace(module)
    except Exception as error:  # it is the user's code that runs here
        raise NotStackableError(f"its forward cannot be traced: {first_line(error)}") from error


def _program(module: nn.Module, graph: fx.Graph) -> Program:
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    inputs = [node for node in graph.nodes if node.op == "placeholder" and (node.users or not node.args)]
    (output,) = (node for node in graph.nodes if node.op == "output")
    if len(inputs) != 1 or not isinstance(output.args[0], fx.Node):
        raise NotStackableError("it does not take one tensor and return one")
    layers = {node: module.get_submodule(node.target) for node in nodes if node.op == "call_module"}
    graph_nodes = _pools_before_relu(nodes, layers)
    taken = _taken_relus(graph_nodes, layers)
    last = {used: node for node in graph_nodes for used in node.all_input_nodes}
    steps = []
    for node in graph_nodes:
        forget = tuple(used for used, user in last.items() if user is node and used is not output.args[0])
        unused = () if node.users or node is output.args[0] else (node,)
        run = _operation(node, module, layers)
        if node in taken.values():
            run = functools.partial(run, relu=True)
        steps.append(_Step(node, _same if node in taken else run, forget + unused))
    draws = any(isinstance(layer, _RANDOM_LAYERS) for layer in module.modules()) or any(
        node.target is nn.functional.dropout for node in nodes
    )
    takes_image = all(_is_for_images(node, layers) for node in inputs[0].users)
    return Program(tuple(steps), inputs[0], output.args[0], draws, takes_image)


def _operation(node: fx.Node, module: nn.Module, layers: dict[fx.Node, nn.Module]) -> Any:
    """What a step computes; refuses one that is in no table, by the name that its author knows it by."""
    layer = layers.get(node)
    if layer is not None:
        if type(layer) not in LAYERS:
            raise NotStackableError(f"layer '{node.target}' ({type(layer).__name__})")
        if getattr(layer, "inplace", False):
            _require_only_user(node)
        kind = LAYERS[type(layer)]
        return lambda now, *inputs, **options: kind(now, layer, *inputs, **options)
    if node.op == "get_attr":
        return _attribute(module, str(node.target))
    table: Any = FUNCTIONS if node.op == "call_function" else METHODS
    if node.target not in table:
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
        raise NotStackableError(f"{'method' if node.op == 'call_method' else 'function'} '{name}'")
    if node.kwargs.get("inplace"):
        _require_only_user(node)
    return table[node.target]


def _require_only_user(node: fx.Node) -> None:
    if len(node.all_input_nodes[0].users) > 1:
        raise NotStackableError(f"'{node.target}' changes in place what is used again")


def _attribute(module: nn.Module, path: str) -> Any:
    holder, _, name = path.rpartition(".")
    owner = module.get_submodule(holder)
    value = getattr(owner, name)
    if isinstance(value, nn.Parameter) and value.requires_grad:
        return lambda now: Stacked(now.parameter(value), now.models)
    return lambda _now: getattr(owner, name)  # at each use: a buffer is replaced when the module moves


def _is_for_images(node: fx.Node, layers: dict[fx.Node, nn.Module]) -> bool:
    return type(layers[node]) in IMAGE_LAYERS if node in layers else node.target in IMAGE_FUNCTIONS


def _pools_before_relu(nodes: list[fx.Node], layers: dict[fx.Node, nn.Module]) -> list[fx.Node]:
    """The steps with max-pooling before the ReLU that it follows: the same numbers and gradients, with less work."""
    for pool in list(nodes):
        is_pool = type(layers[pool]) is nn.MaxPool2d if pool in layers else pool.target in MAX_POOLING
        relu = pool.all_input_nodes[0] if is_pool else pool
        is_relu = type(layers[relu]) is nn.ReLU if relu in layers else relu.target in RELU
        if is_pool and is_relu and len(relu.users) == 1 and relu.op != "placeholder":
            source = relu.all_input_nodes[0]
            pool.replace_all_uses_with(relu)
            relu.replace_input_with(source, pool)
            pool.replace_input_with(relu, source)
            place = nodes.index(pool)  # where it leaves room for the ReLU
            nodes.remove(relu)
            nodes.insert(place, relu)
    return nodes


def _taken_relus(nodes: list[fx.Node], layers: dict[fx.Node, nn.Module]) -> dict[fx.Node, fx.Node]:
    """The ReLUs that are computed by the step before them, and that step."""
    found = {}
    for node in nodes:
        is_relu = type(layers[node]) is nn.ReLU if node in layers else node.target in RELU
        source = node.all_input_nodes[0] if is_relu else node
        takes = type(layers[source]) in WITH_RELU if source in layers else source.target in MAX_POOLING
        if is_relu and takes and len(source.users) == 1:
            found[node] = source
    return found


def _same(_now: Pass, x: Stacked, **_options: Any) -> Stacked:
    return x


def require_same(program: Program, module: nn.Module, examples: torch.Tensor) -> None:
    """Compare a program with its module: two models of the same weights, one of them with a padded batch.

    Raises:
        NotStackableError: their outputs differ, or the program does not run on such examples.
    """
    index = torch.arange(_EXAMPLES) % len(examples)
    batches = [examples[index], examples[index.flip(0)]]
    sizes = (_EXAMPLES, _EXAMPLES - 1)
    same = {id(p): p.detach().expand(2, *p.shape) for p in module.parameters() if p.requires_grad}
    modes = {name: layer.training for name, layer in module.named_modules()}
    try:
        with torch.no_grad():
            outputs = program(Pass(2, same, sizes), Stacked(torch.stack(batches), 2))
            alone = [module.eval()(batch[:size]) for batch, size in zip(batches, sizes, strict=True)]
        agree = [_close(stacked[:size], own) for stacked, own, size in zip(outputs, alone, sizes, strict=True)]
    except NotStackableError:
        raise
    except Exception as error:  # shapes that a table's entry does not take
        raise NotStackableError(f"it does not run in stacks: {first_line(error)}") from error
    finally:
        for name, layer in module.named_modules():
            layer.training = modes[name]
    if not all(agree):
        raise NotStackableError("its outputs are not those of its layers one after the other")


def _close(stacked: torch.Tensor, alone: torch.Tensor) -> bool:
    tolerance = 1e-3 * float(alone.abs().max()) + 1e-5  # far above rounding
    return stacked.shape == alone.shape and torch.allclose(stacked, alone, rtol=1e-3, atol=tolerance)
