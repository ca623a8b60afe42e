"""The exercises of notebook 09: find samples that meet in a layer, and split a contrastive loss in two passes."""

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize, softmax

from course_lib.accumulation import accumulate_contrastive_gradients
from course_lib.exercises.engine import Exercise, expect, run_answer
from course_lib.gradients import compare_gradients, copy_gradients

# ---- 09.1: does a layer look across? ---------------------------------------------------------------------------------


class Does(nn.Module):
    """A layer made of a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]):
        super().__init__()
        self.function = function

    def forward(self, inputs: Tensor) -> Tensor:
        return self.function(inputs)


class LastSamples(nn.Module):
    """Adds the second half of the batch to itself, reversed: the first half is left alone."""

    def forward(self, inputs: Tensor) -> Tensor:
        half = len(inputs) // 2
        return torch.cat([inputs[:half], inputs[half:] + inputs[half:].flip(0)])


LAYERS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "Linear": (lambda: nn.Linear(6, 6), False),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(6), True),
    "BatchNorm1d in evaluation mode": (lambda: nn.BatchNorm1d(6).eval(), False),
    "LayerNorm": (lambda: nn.LayerNorm(6), False),
    "GroupNorm": (lambda: nn.GroupNorm(2, 6), False),
    "a mean over the features taken away": (lambda: Does(lambda x: x - x.mean(dim=1, keepdim=True)), False),
    "a mean over the batch taken away": (lambda: Does(lambda x: x - x.mean(dim=0)), True),
    "a softmax over the batch": (lambda: Does(lambda x: softmax(x, dim=0)), True),
    "a running sum over the batch": (lambda: Does(lambda x: x.cumsum(dim=0)), True),
    "a running sum from the end": (lambda: Does(lambda x: x.flip(0).cumsum(dim=0).flip(0)), True),
    "a mix of the last samples": (LastSamples, True),
    "a sum over the batch in thousandths": (lambda: Does(lambda x: x + 1e-3 * x.sum(dim=0)), True),
}


def judge_test(function) -> str | None:
    """Ask about each layer, in both modes where they differ, and look whether the layer was left as it was."""
    expect(callable(function), f"It must be a function; it is {function!r}.")
    wrong = []
    for name, (build, looks) in LAYERS.items():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            layer, inputs = build(), torch.randn(8, 6)
            before = {key: value.clone() for key, value in layer.state_dict().items()}
            mode, kept = layer.training, inputs.clone()
            answer = run_answer(lambda _, layer=layer, inputs=inputs: function(layer, inputs), Named(name))
        if isinstance(answer, Tensor) and answer.numel() == 1:
            answer = bool(answer)
        expect(answer is not None, f"{name}: it returned nothing; is there a return?")
        is_yes_or_no = hasattr(answer, "__bool__") and type(answer) in (bool, type(answer > 0))
        expect(is_yes_or_no, f"{name}: it must return True or False; it returned {answer!r}.")
        expect(torch.equal(inputs, kept), f"{name}: the inputs are not what they were. Change a copy.")
        expect(layer.training == mode, f"{name}: the layer's mode was changed and left so.")
        moved = [key for key, value in layer.state_dict().items() if not torch.equal(value, before[key])]
        if moved and bool(answer) == looks:
            return f"{name}: your test has moved {', '.join(moved)}. Test a copy of the layer: copy.deepcopy."
        if bool(answer) != looks:
            wrong.append(f"{name} ({'looks' if looks else 'does not look'} across)")
    if not wrong:
        return None
    return f"{len(wrong)} of {len(LAYERS)} layers are judged wrong: {'; '.join(wrong)}."


class Named:
    """Something that prints as a name."""

    def __init__(self, name: str):
        self.name = name

    def __repr__(self) -> str:
        return self.name


def copied(layer: nn.Module) -> nn.Module:
    return copy.deepcopy(layer)


def by_gradients(layer, inputs):
    layer = copied(layer)
    inputs = inputs.double().requires_grad_()
    outputs = layer.double()(inputs)
    weights = torch.linspace(1.0, 2.0, outputs[0].numel(), dtype=torch.float64).reshape(outputs[0].shape)
    for place in range(len(inputs)):
        (found,) = torch.autograd.grad((outputs[place] * weights).sum(), inputs, retain_graph=True)
        others = torch.arange(len(inputs)) != place
        if found[others].abs().max() > 1e-9:
            return True
    return False


def by_new_neighbours(layer, inputs):
    layer = copied(layer)
    generator = torch.Generator().manual_seed(1)
    outputs = layer(inputs)
    for place in range(len(inputs)):
        changed = torch.randn(inputs.shape, generator=generator)
        changed[place] = inputs[place]
        if (layer(changed)[place] - outputs[place]).abs().max() > 1e-5:
            return True
    return False


def by_halves(layer, inputs):
    layer = copied(layer)
    outputs = layer(inputs)
    parts = torch.cat([layer(part) for part in inputs.split(4)])
    return not torch.allclose(outputs, parts, atol=1e-6)


# Wrong answers.


def by_name(layer, inputs):
    return isinstance(layer, nn.BatchNorm1d)


def by_name_and_mode(layer, inputs):
    return isinstance(layer, nn.BatchNorm1d) and layer.training


def any_norm(layer, inputs):
    return "Norm" in type(layer).__name__


def has_buffers(layer, inputs):
    return bool(list(layer.buffers()))


def first_sample_only(layer, inputs):
    layer, changed = copied(layer), inputs.clone()
    changed[1:] += 1
    return not torch.allclose(layer(inputs)[0], layer(changed)[0], atol=1e-6)


def last_sample_only(layer, inputs):
    layer, changed = copied(layer), inputs.clone()
    changed[:-1] += torch.rand(changed[:-1].shape)
    return not torch.allclose(layer(inputs)[-1], layer(changed)[-1], atol=1e-6)


def in_another_order(layer, inputs):
    layer = copied(layer)
    return not torch.allclose(layer(inputs).flip(0), layer(inputs.flip(0)), atol=1e-5)


def coarse(layer, inputs):
    layer = copied(layer)
    each = torch.cat([layer(inputs[[place, place]])[:1] for place in range(len(inputs))])
    return not torch.allclose(layer(inputs), each, atol=0.1)


def in_evaluation_mode(layer, inputs):
    return by_new_neighbours(copied(layer).eval(), inputs)


def always_in_training(layer, inputs):
    return by_new_neighbours(copied(layer).train(), inputs)


def not_on_a_copy(layer, inputs):
    first = layer(inputs)
    return by_new_neighbours(layer, inputs) and first is not None


def leaves_it_in_evaluation(layer, inputs):
    found = by_new_neighbours(layer, inputs)
    layer.eval()
    return found


def changes_the_inputs(layer, inputs):
    found = by_new_neighbours(layer, inputs)
    inputs[1:] += 1
    return found


# ---- 09.2: two passes ------------------------------------------------------------------------------------------------


def pairs_loss(representations: Tensor) -> Tensor:
    """Contrastive loss: the first half of the features must find the second half of the same sample."""
    left, right = normalize(representations, dim=1).chunk(2, dim=1)
    return cross_entropy(left @ right.T / 0.3, torch.arange(len(left)))


def spread_loss(representations: Tensor) -> Tensor:
    """Root mean square of what the representations differ from their mean."""
    return (representations - representations.mean(dim=0)).square().mean().sqrt()


SIZES = ((2, 2, 2), (3, 1), (4,), (1, 2, 3, 2))


class Encoder(nn.Module):
    """A small model that counts the samples of its passes, with and without a graph."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.layers = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 6)).double()
        self.most_in_a_graph = 0

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.layers(inputs)
        if outputs.requires_grad:
            self.most_in_a_graph = max(self.most_in_a_graph, len(inputs))
            self.alive = getattr(self, "alive", 0) + len(inputs)
            self.most_alive = max(getattr(self, "most_alive", 0), self.alive)
            outputs.register_hook(lambda _: self.forget(len(inputs)))
        return outputs

    def forget(self, number: int) -> None:
        self.alive -= number


def judge_two_passes(function) -> str | None:
    """Compare the gradient with the full batch's, for two losses and several cuts, and count samples in a graph."""
    expect(callable(function), f"It must be a function; it is {function!r}.")
    for group_loss in (pairs_loss, spread_loss):
        for sizes in SIZES:
            generator = torch.Generator().manual_seed(len(sizes))
            parts = [torch.randn(size, 5, generator=generator, dtype=torch.float64) for size in sizes]
            message = judge_one_cut(function, parts, group_loss)
            if message:
                return f"{group_loss.__name__.replace('_', ' ')}, micro-batches of {list(sizes)}: {message}"
    return None


def judge_one_cut(function, parts: Sequence[Tensor], group_loss) -> str | None:
    reference, model = Encoder(), Encoder()
    loss = group_loss(reference(torch.cat(list(parts))))
    loss.backward()
    run_answer(lambda _: function(model, list(parts), group_loss), Named(f"{len(parts)} micro-batches"))
    wanted, found = copy_gradients(reference), copy_gradients(model)
    if all(value is None for value in found.values()) or not found:
        return "no parameter has a gradient: the representations must go backward into the model."
    largest = max(map(len, parts))
    if model.most_in_a_graph > largest:
        return f"one pass with a graph saw {model.most_in_a_graph} samples; the largest micro-batch has {largest}."
    if getattr(model, "most_alive", 0) > largest:
        return (
            f"the graphs of {model.most_alive} samples were in memory together; {largest} is the largest micro-batch. "
            "Make the first pass without graphs."
        )
    gap = compare_gradients(wanted, found)
    if gap.agree(rtol=1e-9):
        return None
    for text, other in other_gradients(parts, group_loss).items():
        if compare_gradients(other, found).agree(rtol=1e-9):
            return f"the relative error is {gap.relative_error:.3g}: {text}."
    if gap.cosine > 1 - 1e-9:
        return f"the gradient is {gap.scale:.3g} times the full batch's. Nothing is to be divided or repeated here."
    return f"the relative error is {gap.relative_error:.3g}: this is another gradient than the full batch's."


def other_gradients(parts: Sequence[Tensor], group_loss) -> dict[str, dict[str, Tensor]]:
    """The gradients of the usual mistakes."""

    def of(loss_of_model) -> dict[str, Tensor]:
        model = Encoder()
        loss_of_model(model).backward()
        return copy_gradients(model)

    def handed(order) -> Callable:
        def loss(model):
            codes = torch.cat([model(part) for part in parts]).detach().requires_grad_()
            (gradients,) = torch.autograd.grad(group_loss(codes), codes)
            return order(model, gradients)

        return loss

    sizes = [len(part) for part in parts]
    everything = torch.cat(list(parts))
    found = {
        "each micro-batch was compared with itself alone, and the mean taken": lambda m: (
            sum(group_loss(m(part)) for part in parts) / len(parts)
        ),
        "each micro-batch was compared with itself alone, and all were added": lambda m: sum(
            group_loss(m(part)) for part in parts
        ),
        "only the last micro-batch went backward": handed(
            lambda m, g: (m(parts[-1]) * g.split(sizes)[-1]).sum(),
        ),
        "only the first micro-batch went backward": handed(
            lambda m, g: (m(parts[0]) * g.split(sizes)[0]).sum(),
        ),
        "the representations went backward with gradients of 1": lambda m: m(everything).sum(),
        "the gradients were handed to the samples in another order": handed(
            lambda m, g: sum((m(p) * q).sum() for p, q in zip(parts, g.flip(0).split(sizes), strict=True)),
        ),
        "every micro-batch was handed the first gradients": handed(
            lambda m, g: sum((m(p) * g[: len(p)]).sum() for p in parts),
        ),
    }
    return {text: of(loss) for text, loss in found.items()}


# Right answers.


def with_the_library(model, micro_batches, group_loss):
    accumulate_contrastive_gradients(model, micro_batches, lambda model, part: model(part), group_loss)


def one_part_at_a_time(model, micro_batches, group_loss):
    with torch.no_grad():
        codes = [model(part) for part in micro_batches]
    for place, part in enumerate(micro_batches):
        group_loss(torch.cat([*codes[:place], model(part), *codes[place + 1 :]])).backward()


def by_products(model, micro_batches, group_loss):
    with torch.no_grad():
        codes = torch.cat([model(part) for part in micro_batches])
    wanted = torch.func.grad(group_loss)(codes)
    for part, gradient in zip(micro_batches, wanted.split([len(part) for part in micro_batches]), strict=True):
        (model(part) * gradient).sum().backward()


# Wrong answers.


def two_passes(change=lambda gradient: gradient, which=slice(None), times=1.0):
    def answer(model, micro_batches, group_loss):
        with torch.no_grad():
            codes = torch.cat([model(part) for part in micro_batches])
        codes.requires_grad_()
        group_loss(codes).backward()
        gradients = change(codes.grad).split([len(part) for part in micro_batches])
        for part, gradient in list(zip(micro_batches, gradients, strict=True))[which]:
            model(part).backward(gradient * times)

    return answer


def in_batch_only(model, micro_batches, group_loss):
    for part in micro_batches:
        (group_loss(model(part)) / len(micro_batches)).backward()


def in_batch_sum(model, micro_batches, group_loss):
    for part in micro_batches:
        group_loss(model(part)).backward()


def whole_batch(model, micro_batches, group_loss):
    group_loss(model(torch.cat(micro_batches))).backward()


def all_graphs(model, micro_batches, group_loss):
    group_loss(torch.cat([model(part) for part in micro_batches])).backward()


def no_second_pass(model, micro_batches, group_loss):
    with torch.no_grad():
        codes = torch.cat([model(part) for part in micro_batches])
    codes.requires_grad_()
    group_loss(codes).backward()


def first_gradients(model, micro_batches, group_loss):
    with torch.no_grad():
        codes = torch.cat([model(part) for part in micro_batches])
    codes.requires_grad_()
    group_loss(codes).backward()
    for part in micro_batches:
        model(part).backward(codes.grad[: len(part)])


def divided_by_k(model, micro_batches, group_loss):
    two_passes(times=1 / len(micro_batches))(model, micro_batches, group_loss)


def without_a_graph(model, micro_batches, group_loss):
    with torch.no_grad():
        codes = torch.cat([model(part) for part in micro_batches])
    group_loss(codes).backward()


EXERCISES = [
    Exercise(
        number="09.1",
        title="test a layer for samples that meet",
        task="""
You may not know a layer's name, but you can run it. Say whether an output of `layer` depends on *other* samples of the
batch than its own: return True or False. `inputs` has the shape `(8, 6)`; the layers have no randomness. Test the layer
in the mode in which it comes, and leave layer and inputs as they were.

The check asks about twelve layers.
""",
        difficulty=3,
        importance=4,
        minutes=8,
        answer="looks_across",
        setup="import torch",
        stub="""
def looks_across(layer, inputs):
    pass  # True or False
""",
        judge=judge_test,
        hints=(
            "Hold one sample and change all the others. What may happen to its output, and what may not?",
            "Do it for every place in the batch: some layers look only backward, or only at some samples. Compare with "
            "a small tolerance. What does a forward pass change in BatchNorm?",
            "`layer = copy.deepcopy(layer)`. For each `place`: `changed = torch.randn_like(inputs)`, "
            "`changed[place] = inputs[place]`, and compare `layer(changed)[place]` with `layer(inputs)[place]`.",
        ),
        solution="""
import copy

def looks_across(layer, inputs):
    layer = copy.deepcopy(layer)  # a pass moves running statistics
    for place in range(len(inputs)):
        changed = torch.randn_like(inputs)
        changed[place] = inputs[place]
        if not torch.allclose(layer(changed)[place], layer(inputs)[place], atol=1e-5):
            return True
    return False
""",
        closing="All twelve, and no list of names. The same test works on the layer that you will write next.",
        right=(by_gradients, by_new_neighbours, by_halves),
        wrong={
            "BatchNorm1d in evaluation mode (does not look across); a mean over the batch": by_name,
            "6 of 12 layers are judged wrong: a mean over the batch": by_name_and_mode,
            "LayerNorm (does not look across); GroupNorm": any_norm,
            "a running sum over the batch (looks across); a mix of the last samples": first_sample_only,
            "1 of 12 layers are judged wrong: a running sum from the end": last_sample_only,
            "4 of 12 layers are judged wrong: BatchNorm1d (looks across); a mean over the batch": in_another_order,
            "a sum over the batch in thousandths (looks across).": coarse,
            "1 of 12 layers are judged wrong: BatchNorm1d (looks across)": in_evaluation_mode,
            "1 of 12 layers are judged wrong: BatchNorm1d in evaluation mode": always_in_training,
            "your test has moved running_mean": not_on_a_copy,
            "the layer's mode was changed": leaves_it_in_evaluation,
            "the inputs are not what they were": changes_the_inputs,
            "7 of 12 layers are judged wrong: BatchNorm1d (looks": lambda layer, inputs: False,
            "5 of 12 layers are judged wrong: Linear": lambda layer, inputs: True,
            "it must return True or False": lambda layer, inputs: "yes",
            "It must be a function": True,
        },
    ),
    Exercise(
        number="09.2",
        title="split a contrastive loss",
        task="""
`group_loss(representations)` compares every sample of the group with every other. Put the gradient of the whole group
into `.grad`, with the graph of one micro-batch in memory at a time. `micro_batches` is a list of input tensors,
`model(part)` gives their representations, one row a sample. Gradients are None at entry. Return nothing.
""",
        difficulty=4,
        importance=4,
        minutes=12,
        answer="contrastive_gradient",
        setup="import torch",
        stub="""
def contrastive_gradient(model, micro_batches, group_loss):
    pass  # two passes
""",
        judge=judge_two_passes,
        hints=(
            "The loss needs all representations, not all graphs. Representations are small.",
            "First pass without graphs: all representations, joined. From these alone the loss gives one gradient row "
            "for each sample. Second pass: a micro-batch at a time, with a graph.",
            "`codes` from the first pass, `codes.requires_grad_()`, `group_loss(codes).backward()`. Then "
            "for each part: `model(part).backward(rows)`, with the rows of `codes.grad` that are the part's.",
        ),
        solution="""
def contrastive_gradient(model, micro_batches, group_loss):
    with torch.no_grad():
        codes = torch.cat([model(part) for part in micro_batches])
    codes.requires_grad_()
    group_loss(codes).backward()
    rows = codes.grad.split([len(part) for part in micro_batches])
    for part, gradient in zip(micro_batches, rows, strict=True):
        model(part).backward(gradient)
""",
        closing="It is the full batch's gradient, for two losses and four cuts, at the price of one more forward pass.",
        right=(with_the_library, one_part_at_a_time, by_products),
        wrong={
            "compared with itself alone, and the mean taken": in_batch_only,
            "compared with itself alone, and all were added": in_batch_sum,
            "one pass with a graph saw 6 samples": whole_batch,
            "the graphs of 6 samples were in memory together": all_graphs,
            "no parameter has a gradient": no_second_pass,
            "only the last micro-batch went backward": two_passes(which=slice(-1, None)),
            "only the first micro-batch went backward": two_passes(which=slice(0, 1)),
            "with gradients of 1": two_passes(change=torch.ones_like),
            "in another order": two_passes(change=lambda gradient: gradient.flip(0)),
            "handed the first gradients": first_gradients,
            "0.333 times the full batch's": divided_by_k,
            "2 times the full batch's": two_passes(times=2.0),
            "another gradient than the full batch's": two_passes(change=torch.sign),
            "backward had nothing to go back through": without_a_graph,
            "It must be a function": 3,
        },
    ),
]
