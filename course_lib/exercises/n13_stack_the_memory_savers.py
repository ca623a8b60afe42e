"""The exercises of notebook 13: a loss that never holds all scores, and the bytes that no micro-batch can save."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from course_lib.exercises.engine import Exercise, expect, run_answer
from course_lib.memory import format_bytes, measure_memory
from course_lib.models import SmallGPT, dense_net

# ---- 13.1: the loss in chunks ----------------------------------------------------------------------------------------

CASES = ((64, 8), (61, 8), (64, 16), (5, 8))  # tokens, chunk
WIDTH, SCORES = 4, 512


def problem(num_tokens: int) -> tuple[Tensor, nn.Linear, Tensor]:
    """Features that want a gradient, a head, and targets of which some are ignored; in float64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(num_tokens)
        features = torch.randn(num_tokens, WIDTH, dtype=torch.float64, requires_grad=True)
        head = nn.Linear(WIDTH, SCORES, bias=False).double()
        targets = torch.randint(SCORES, (num_tokens,))
    targets[1::5] = -100
    return features, head, targets


def judge_chunked_loss(function) -> str | None:
    """Compare value and gradients with the whole loss, and hold the bytes of a pass against those of all scores."""
    expect(callable(function), f"It must be a function; it is {function!r}.")
    for num_tokens, chunk in CASES:
        head_line = f"{num_tokens} tokens, {chunk} at a time: "
        features, head, targets = problem(num_tokens)
        whole = cross_entropy(head(features), targets, reduction="sum")
        wanted = torch.autograd.grad(whole, (features, head.weight))
        wanted_value = whole.item()
        del whole
        with measure_memory(features, head, targets) as meter:
            loss = run_answer(lambda _, a=(features, head, targets, chunk): function(*a), Tokens(num_tokens))
            is_scalar = isinstance(loss, Tensor) and loss.ndim == 0
            if is_scalar and loss.requires_grad:
                loss.backward()
        expect(loss is not None, f"{head_line}it returned nothing; is there a return?")
        expect(is_scalar, f"{head_line}it must return a scalar tensor; it returned {kind_of(loss)}.")
        value = loss.item()
        ratio = value / wanted_value
        if abs(ratio - 1) > 1e-9:
            return f"{head_line}the sum is {ratio:.4g} times the right one{why(num_tokens, chunk, targets, ratio)}."
        expect(loss.requires_grad, f"{head_line}the value is right, but nothing goes backward from it.")
        for name, mine, good in zip(("features", "head"), (features.grad, head.weight.grad), wanted, strict=True):
            expect(mine is not None, f"{head_line}the value is right, but the {name} have no gradient.")
            error = ((mine - good).norm() / good.norm()).item()
            expect(error < 1e-9, f"{head_line}the gradient of the {name} is {error:.2g} off, relatively.")
        used = meter.peak_bytes - meter.timeline.live_bytes[0]
        scores_bytes = num_tokens * SCORES * 8
        if num_tokens >= 4 * chunk and num_tokens // chunk == 8 and used > 0.75 * scores_bytes:
            copies = used / scores_bytes
            kept = "all at once" if copies > 2 else "one chunk after the other, and kept for the backward pass"
            return (
                f"{head_line}right, but {format_bytes(used)} were alive at the peak, {copies:.1f} times "
                f"all scores ({format_bytes(scores_bytes)}): they were made {kept}."
            )
    return None


class Tokens:
    def __init__(self, number: int):
        self.number = number

    def __repr__(self) -> str:
        return f"{self.number} tokens"


def kind_of(value) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{type(value).__name__}"


def why(num_tokens: int, chunk: int, targets: Tensor, ratio: float) -> str:
    """Say what a ratio of the sums stands for."""
    scored = int((targets != -100).sum())
    for text, other in (
        ("the mean over the scored tokens", 1 / scored),
        ("the sum divided by all tokens, ignored ones included", 1 / num_tokens),
        ("the sum divided by the chunk's size", 1 / chunk),
        ("the sum divided by the number of chunks", 1 / -(-num_tokens // chunk)),
    ):
        if abs(ratio / other - 1) < 1e-9:
            return f": that is {text}"
    return ""


def with_checkpoint(use_reentrant: bool, chunk_sum=None) -> Callable:
    def of_one(features, head, targets):
        return cross_entropy(head(features), targets, reduction="sum")

    def answer(features, head, targets, chunk_tokens):
        total = features.new_zeros(())
        for start in range(0, len(features), chunk_tokens):
            part = slice(start, start + chunk_tokens)
            one = chunk_sum or of_one
            total = total + checkpoint(one, features[part], head, targets[part], use_reentrant=use_reentrant)
        return total

    return answer


class Fused(torch.autograd.Function):
    """Makes the gradients of each chunk in the forward pass, while its scores are there."""

    @staticmethod
    def forward(ctx, features, weight, targets, chunk_tokens):
        total = features.new_zeros(())
        of_features, of_weight = torch.empty_like(features), torch.zeros_like(weight)
        for start in range(0, len(features), chunk_tokens):
            part = slice(start, start + chunk_tokens)
            slopes = torch.log_softmax(features[part] @ weight.T, dim=1)
            scored = targets[part] != -100
            rows, labels = torch.arange(len(scored))[scored], targets[part][scored]
            total -= slopes[rows, labels].sum()
            slopes.exp_()
            slopes[rows, labels] -= 1
            slopes[~scored] = 0
            of_features[part] = slopes @ weight
            of_weight += slopes.T @ features[part]
        ctx.save_for_backward(of_features, of_weight)
        return total

    @staticmethod
    def backward(ctx, slope):
        of_features, of_weight = ctx.saved_tensors
        return slope * of_features, slope * of_weight, None, None


def fused(features, head, targets, chunk_tokens):
    return Fused.apply(features, head.weight, targets, chunk_tokens)


# Wrong answers.


def in_chunks(features, head, targets, chunk_tokens, reduction="sum"):
    parts = zip(features.split(chunk_tokens), targets.split(chunk_tokens), strict=True)
    return sum(cross_entropy(head(part), labels, reduction=reduction) for part, labels in parts)


def only_the_loss_again(features, head, targets, chunk_tokens):
    def of_scores(scores, labels):
        return cross_entropy(scores, labels, reduction="sum")

    parts = zip(features.split(chunk_tokens), targets.split(chunk_tokens), strict=True)
    return sum(checkpoint(of_scores, head(part), labels, use_reentrant=False) for part, labels in parts)


def without_the_tail(features, head, targets, chunk_tokens):
    whole = len(features) // chunk_tokens * chunk_tokens
    return with_checkpoint(False)(features[:whole], head, targets[:whole], chunk_tokens)


def with_a_detached_head(features, head, targets, chunk_tokens):
    weight = head.weight.detach()
    return with_checkpoint(False, lambda x, _, y: cross_entropy(x @ weight.T, y, reduction="sum"))(
        features, head, targets, chunk_tokens
    )


# ---- 13.2: the floor -------------------------------------------------------------------------------------------------


def partly_frozen() -> nn.Module:
    model = dense_net(hidden=(32, 16))
    for parameter in list(model.parameters())[:2]:
        parameter.requires_grad_(False)
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "a dense network, AdamW": (dense_net, 2),
    "a dense network, SGD with momentum": (dense_net, 1),
    "a dense network, plain SGD": (dense_net, 0),
    "a dense network in float64, AdamW": (lambda: dense_net(dtype=torch.float64), 2),
    "a network whose first layer is frozen, AdamW": (partly_frozen, 2),
    "a network with BatchNorm, AdamW": (lambda: nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)), 2),
    "a GPT with a tied head, AdamW": (lambda: SmallGPT(50, context=8, width=16, heads=2, depth=1), 2),
}


def made(model: nn.Module, states: int) -> int:
    """Make one step, and add up the bytes of what is then there; counters of steps (one number each) left out."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = {
        0: lambda: torch.optim.SGD(trainable, lr=0.0),
        1: lambda: torch.optim.SGD(trainable, lr=0.0, momentum=0.9),
        2: lambda: torch.optim.AdamW(trainable, lr=0.0),
    }[states]()
    for parameter in trainable:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    kept = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    gradients = [parameter.grad for parameter in trainable]
    there = [*model.parameters(), *model.buffers(), *gradients, *(value for value in kept if value.ndim)]
    return sum(tensor.nbytes for tensor in there)


def sizes(tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def trainable_bytes(model: nn.Module) -> int:
    return sizes(parameter for parameter in model.parameters() if parameter.requires_grad)


OTHER_FLOORS: dict[str, Callable] = {
    "the gradients are missing": lambda m, s: right_floor(m, s) - trainable_bytes(m),
    "the parameters are missing": lambda m, s: right_floor(m, s) - sizes(m.parameters()),
    "the optimizer's state is missing": lambda m, s: right_floor(m, s) - s * trainable_bytes(m),
    "the optimizer's state is counted once, however many tensors it keeps": lambda m, s: (
        sizes(m.parameters()) + sizes(m.buffers()) + 2 * trainable_bytes(m)
    ),
    "four copies are right for AdamW only": lambda m, s: 4 * sizes(m.parameters()),
    "frozen parameters have neither gradient nor state": lambda m, s: (
        (2 + s) * sizes(m.parameters()) + sizes(m.buffers())
    ),
    "buffers are missing": lambda m, s: right_floor(m, s) - sizes(m.buffers()),
    "every number is counted as 4 bytes": lambda m, s: (
        sum(p.numel() * (4 + 4 * (1 + s) * p.requires_grad) for p in m.parameters()) + sizes(m.buffers())
    ),
    "these are numbers, not bytes": lambda m, s: (
        sum(p.numel() * (1 + (1 + s) * p.requires_grad) for p in m.parameters()) + sum(b.numel() for b in m.buffers())
    ),
    "a tied parameter is one parameter, counted once": lambda m, s: (
        sizes(m.state_dict().values())
        + (1 + s) * sum(p.nbytes for _, p in m.named_parameters(remove_duplicate=False) if p.requires_grad)
    ),
}


def right_floor(model: nn.Module, states: int) -> int:
    return sizes(model.parameters()) + sizes(model.buffers()) + (1 + states) * trainable_bytes(model)


def judge_floor(function) -> str | None:
    """Compare with what one step makes, for seven pairs of a model and an optimizer."""
    built = {name: (build(), states) for name, (build, states) in MODELS.items()}
    found = {name: run_answer(function, model, states) for name, (model, states) in built.items()}
    for name, (_, states) in built.items():
        value, wanted = found[name], made(MODELS[name][0](), states)
        expect(value is not None, f"{name}: it returned nothing; is there a return?")
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        expect(is_number, f"{name}: it must return a number of bytes; it returned a {type(value).__name__}.")
        if value == wanted:
            continue
        text = f"{name}: {value:,.10g} bytes, {abs(value - wanted):,.10g} too {'many' if value > wanted else 'few'}"
        for why_wrong, other in OTHER_FLOORS.items():
            if all(found[key] == other(*pair) for key, pair in built.items()):
                return f"{text}: {why_wrong}."
        return f"{text}."
    return None


def by_parameter(model, states):
    total = sum(buffer.nbytes for buffer in model.buffers())
    for parameter in model.parameters():
        total += parameter.nbytes * (2 + states if parameter.requires_grad else 1)
    return total


def by_numbers(model, states):
    every = [(p.numel(), p.element_size(), p.requires_grad) for p in model.parameters()]
    every += [(b.numel(), b.element_size(), False) for b in model.buffers()]
    return sum(number * size * (1 + trains * (1 + states)) for number, size, trains in every)


EXERCISES = [
    Exercise(
        number="13.1",
        title="never hold all the scores",
        task="""
Return the sum of the cross-entropy over all tokens, as a scalar that can go backward, without ever holding the scores
of more than `chunk_tokens` tokens: not in the forward pass, and not for the backward pass. `features` has the shape
`(tokens, width)`, `head(features)` gives the scores, `targets` has the shape `(tokens,)`, with -100 where a token is
ignored. The last chunk may be short.
""",
        difficulty=4,
        importance=4,
        minutes=10,
        answer="chunked_loss",
        setup="from torch.nn import functional\nfrom torch.utils.checkpoint import checkpoint",
        stub="""
def chunked_loss(features, head, targets, chunk_tokens):
    pass  # a scalar tensor
""",
        judge=judge_chunked_loss,
        hints=(
            "A sum over tokens is a sum over chunks. That part is easy. Who keeps the scores of a chunk that is done?",
            "Autograd does, for the backward pass. `checkpoint` makes them again, if head *and* loss are in it.",
            "A function of one chunk, `cross_entropy(head(x), y, reduction='sum')`, and the sum of "
            "`checkpoint(that, x, y, use_reentrant=False)` over `features.split(chunk_tokens)` and the targets' split.",
        ),
        solution="""
def chunked_loss(features, head, targets, chunk_tokens):
    def chunk_sum(x, y):
        return functional.cross_entropy(head(x), y, reduction="sum")

    chunks = zip(features.split(chunk_tokens), targets.split(chunk_tokens), strict=True)
    return sum(checkpoint(chunk_sum, x, y, use_reentrant=False) for x, y in chunks)
""",
        closing="Value and both gradients are those of the whole loss, and the scores were never there together.",
        right=(with_checkpoint(False), with_checkpoint(True), fused),
        wrong={
            "they were made all at once": lambda x, h, y, n: cross_entropy(h(x), y, reduction="sum"),
            "one chunk after the other, and kept": in_chunks,
            "times all scores (256.0 KiB)": only_the_loss_again,
            "that is the mean over the scored tokens": lambda x, h, y, n: cross_entropy(h(x), y),
            "ignored ones included": lambda x, h, y, n: with_checkpoint(False)(x, h, y, n) / len(x),
            "the sum divided by the chunk's size": lambda x, h, y, n: with_checkpoint(False)(x, h, y, n) / n,
            "64 tokens, 8 at a time: the sum is 0.15": lambda x, h, y, n: in_chunks(x, h, y, n, "mean"),
            "61 tokens, 8 at a time: the sum is": without_the_tail,
            "64 tokens, 8 at a time: the sum is 1.2": lambda x, h, y, n: with_checkpoint(False)(
                x, h, y.clamp(min=0), n
            ),
            "nothing goes backward from it": lambda x, h, y, n: with_checkpoint(False)(x, h, y, n).detach(),
            "the head have no gradient": with_a_detached_head,
            "the features have no gradient": lambda x, h, y, n: with_checkpoint(False)(x.detach(), h, y, n),
            "a tensor of shape (64,)": lambda x, h, y, n: cross_entropy(h(x), y, reduction="none"),
            "it returned float": lambda x, h, y, n: in_chunks(x, h, y, n).item(),
            "It must be a function": 8,
        },
    ),
    Exercise(
        number="13.2",
        title="find the floor",
        task="""
How many bytes does an update of `model` need even if its micro-batches weigh nothing? Count parameters, buffers,
gradients and the optimizer's state. `states` is how many tensors the optimizer keeps for each parameter that it trains,
each as large as the parameter: 0 for plain SGD, 1 with momentum, 2 for AdamW. Leave its step counters out. Parameters
may be frozen, tied, or not float32.
""",
        difficulty=2,
        importance=5,
        minutes=6,
        answer="floor_bytes",
        stub="""
def floor_bytes(model, states):
    pass  # bytes
""",
        judge=judge_floor,
        hints=(
            "Take one trained parameter: how many tensors of its size are there at the step? And of a frozen one?",
            "A trained parameter counts 2 + `states` times, a frozen one once, a buffer once. `nbytes` knows dtypes.",
            "Loop over `model.parameters()`, which gives a tied parameter once, and add `parameter.nbytes` times "
            "`2 + states` or 1, by `parameter.requires_grad`. Then add the `nbytes` of `model.buffers()`.",
        ),
        solution="""
def floor_bytes(model, states):
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    trained = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    return parameters + buffers + trained + states * trained
""",
        closing="To the byte, for seven models. No micro-batch gets you below; a frozen layer does.",
        right=(by_parameter, by_numbers, right_floor),
        wrong={
            **OTHER_FLOORS,
            "too many.": lambda model, states: right_floor(model, states) + 8,
            "it returned nothing": lambda model, states: print(right_floor(model, states)),
            "it returned a str": lambda model, states: format_bytes(right_floor(model, states)),
            "It must be a function": 16384,
        },
    ),
]
