"""Predicted memory: to the byte what the meter finds around the real second update, and nothing touched on the way."""

import copy
import random
import re
import resource
import signal

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

from course_lib.accumulation import update_parameters
from course_lib.batches import count_samples, split_batch
from course_lib.losses import (
    class_weighted_cross_entropy,
    count_tokens,
    cross_entropy_sum,
    token_cross_entropy_sum,
)
from course_lib.memory import MemoryPredictor, MemoryReport, measure_memory, memory_budget, predict_memory
from course_lib.memory.predicted import _LikeOnCuda
from course_lib.models import SmallGPT, conv_net, dense_net

# ---------------------------------------------------------------------------------------------------------------------
# Models, batches and losses


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        self.use_reentrant = use_reentrant
        self.first, self.last = nn.Linear(64, 32), nn.Linear(32, 10)
        blocks = (nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Dropout(0.3), nn.Linear(256, 32)) for _ in range(3))
        self.blocks = nn.ModuleList(blocks)

    def forward(self, images):
        stream = self.first(images.flatten(1))
        for block in self.blocks:
            stream = stream + checkpoint(block, stream, use_reentrant=self.use_reentrant)
        return self.last(stream)


class Reader(nn.Module):
    """Tokens (B, T) to scores (B, 10), through a recurrent layer or a transformer encoder."""

    def __init__(self, body):
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(30, 16, padding_idx=0), body, nn.Linear(16, 10)

    def forward(self, tokens):
        found = self.body(self.embed(tokens))
        return self.head((found[0] if isinstance(found, tuple) else found)[:, -1])


class Experts(nn.Module):
    """Densely gated experts, with an auxiliary number that the module keeps, a buffer and a plain tensor."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(64, 3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(64, 40), nn.SiLU(), nn.Linear(40, 10)) for _ in range(3))
        self.register_buffer("scale", torch.full((64,), 2.0))
        self.shift, self.calls, self.seen = torch.ones(64), 0, []

    def forward(self, images):
        inputs = images.flatten(1) * self.scale + self.shift
        weights = self.gate(inputs).softmax(-1)
        self.calls += 1
        self.seen[:] = [weights.detach().mean(0)]
        return (torch.stack([expert(inputs) for expert in self.experts], 1) * weights.unsqueeze(-1)).sum(1)


class Odd(nn.Module):
    """A dense network that does something in its forward pass with the scores."""

    def __init__(self, act):
        super().__init__()
        self.body, self.act = dense_net(hidden=(32,)), act

    def forward(self, images):
        return self.act(self.body(images))


def frozen_net():
    model = dense_net()
    model[1].requires_grad_(False)
    return model


def normed_net():
    weight_norm, old_weight_norm = nn.utils.parametrizations.weight_norm, nn.utils.weight_norm
    layers = [nn.Flatten(), old_weight_norm(nn.Linear(64, 32)), nn.Tanh(), weight_norm(nn.Linear(32, 10))]
    return nn.Sequential(*layers)


def batch_norm_net():
    layers = [nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8, momentum=None), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Conv2d(8, 8, 3, groups=8), nn.GroupNorm(2, 8), nn.Flatten(), nn.Linear(32, 10))


def encoder(dropout):
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, dropout, batch_first=True), 2)


def small_gpt(dropout=0.0, tied_head=True):
    return SmallGPT(30, context=7, width=32, heads=2, depth=2, dropout=dropout, tied_head=tied_head)


def autocast_loss(model, micro_batch):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return cross_entropy_sum(model, micro_batch)


def dict_loss(model, micro_batch):
    return functional.cross_entropy(model(micro_batch["x"][0]), micro_batch["more"]["y"], reduction="sum")


def two_terms(model, micro_batch):
    scores = model(micro_batch[0])
    return {"a": functional.cross_entropy(scores, micro_batch[1], reduction="sum"), "b": scores.square().sum()}


def two_counts(micro_batch):
    return {"a": len(micro_batch[1]), "b": len(micro_batch[1])}


def draw(*shape, high=None):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(high, shape, generator=generator) if high else torch.rand(shape, generator=generator)


IMAGES, LABELS, TOKENS = draw(12, 1, 8, 8), draw(12, high=10), draw(12, 7, high=30)
DIGITS, READING, TEXT = (IMAGES, LABELS), (TOKENS, LABELS), (TOKENS, TOKENS)
WEIGHTED, COUNT_WEIGHTS = class_weighted_cross_entropy([1.0] * 10)

CASES = {
    "dense": (dense_net, DIGITS, cross_entropy_sum),
    "float64": (lambda: dense_net(dtype=torch.float64), (IMAGES.double(), LABELS), cross_entropy_sum),
    "convolutions": (lambda: conv_net(channels=4, depth=2), DIGITS, cross_entropy_sum),
    "GPT": (small_gpt, TEXT, token_cross_entropy_sum, count_tokens),
    "GPT with dropout, untied": (lambda: small_gpt(0.1, False), TEXT, token_cross_entropy_sum, count_tokens),
    "reentrant checkpoints": (lambda: Checkpointed(True), DIGITS, cross_entropy_sum),
    "checkpoints": (lambda: Checkpointed(False), DIGITS, cross_entropy_sum),
    "GRU": (lambda: Reader(nn.GRU(16, 16, 2, batch_first=True, dropout=0.1)), READING, cross_entropy_sum),
    "encoder with dropout": (lambda: Reader(encoder(0.1)), READING, cross_entropy_sum),
    "encoder": (lambda: Reader(encoder(0.0)), READING, cross_entropy_sum),
    "experts": (Experts, DIGITS, cross_entropy_sum),
    "frozen": (frozen_net, DIGITS, cross_entropy_sum),
    "batch norm": (batch_norm_net, DIGITS, cross_entropy_sum),
    "weight norm": (normed_net, DIGITS, cross_entropy_sum),
    "autocast": (dense_net, DIGITS, autocast_loss),
    "a dict": (dense_net, {"x": [IMAGES], "more": {"y": LABELS}}, dict_loss),
    "two terms": (dense_net, DIGITS, two_terms, two_counts),
    "weights": (dense_net, DIGITS, WEIGHTED, COUNT_WEIGHTS),
    "a slice": (dense_net, (draw(100, 1, 8, 8)[20:32], LABELS), cross_entropy_sum),
    "inputs with gradients": (dense_net, (IMAGES.clone().requires_grad_(), LABELS), cross_entropy_sum),
}


def build(name):
    """Return (model, batch, loss_sum, count) of 12 samples; the same on every call."""
    make, batch, loss_sum, *count = CASES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make(), batch, loss_sum, count[0] if count else count_samples


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.01)


def measured(model, batch, loss_sum, optimizer, micro_batch_size, count=count_samples):
    """What the meter finds around the second update, which is really run."""
    micro_batches = split_batch(batch, micro_batch_size)
    update_parameters(model, optimizer, micro_batches, loss_sum, count)
    with measure_memory(model, optimizer, batch) as meter:
        update_parameters(model, optimizer, micro_batches, loss_sum, count)
    return meter


# ---------------------------------------------------------------------------------------------------------------------
# To the byte


@pytest.mark.parametrize("micro_batch_size", [12, 7, 6, 4])  # 1, 2 unequal, 2 and 3 micro-batches
@pytest.mark.parametrize("name", CASES)
def test_the_prediction_is_what_the_second_update_holds_to_the_byte(name, micro_batch_size):
    model, batch, loss_sum, count = build(name)
    for make in (sgd, torch.optim.AdamW) if micro_batch_size in (12, 4) else (sgd,):
        optimizer = make(model.parameters())
        before = predict_memory(model, batch, loss_sum, optimizer, micro_batch_size=micro_batch_size)
        meter = measured(model, batch, loss_sum, optimizer, micro_batch_size, count)
        assert (before.peak_bytes, before.at_peak) == (meter.peak_bytes, meter.at_peak)
        assert not before.measured
        assert sum(before.at_peak.values()) == before.peak_bytes
    after = predict_memory(model, batch, loss_sum, optimizer, micro_batch_size=micro_batch_size)
    assert after == before  # with the optimizer's state there already


OPTIMIZERS = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True, weight_decay=0.1),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, fused=True),
    "AdamW, rate in a tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-3)),
    "RMSprop centered": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "Adagrad fused": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
    "Adadelta": torch.optim.Adadelta,
    "Adamax": torch.optim.Adamax,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "ASGD": torch.optim.ASGD,
    "Rprop": torch.optim.Rprop,
    "Adafactor": torch.optim.Adafactor,
    "Adafactor foreach": lambda p: torch.optim.Adafactor(p, foreach=True),
    "two groups": lambda p: torch.optim.AdamW(
        [{"params": (p := list(p))[:2], "foreach": True}, {"params": p[2:], "amsgrad": True}]
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_is_predicted_to_the_byte(name):
    for micro_batch_size in (12, 4):
        model = dense_net()
        optimizer = OPTIMIZERS[name](model.parameters())
        report = predict_memory(model, DIGITS, cross_entropy_sum, optimizer, micro_batch_size=micro_batch_size)
        meter = measured(model, DIGITS, cross_entropy_sum, optimizer, micro_batch_size)
        assert (report.peak_bytes, report.at_peak) == (meter.peak_bytes, meter.at_peak)
        assert not report.measured


def test_the_implementation_of_the_optimizer_is_named():
    model = dense_net()

    def said(optimizer, **options):
        report = predict_memory(model, DIGITS, cross_entropy_sum, optimizer, micro_batch_size=4, **options)
        return report.assumptions[0]

    class Own(torch.optim.SGD):
        pass

    optimizers = torch.optim
    assert said(optimizers.AdamW(model.parameters())) == "AdamW: for-loop implementation, as on a CPU"
    assert said(optimizers.AdamW(model.parameters()), device="cuda") == "AdamW: foreach implementation, as on CUDA"
    asked = "implementation, as its groups ask for"
    assert said(optimizers.SGD(model.parameters(), fused=True)) == f"SGD: fused {asked}"
    assert said(optimizers.Adam(model.parameters(), foreach=True)) == f"Adam: foreach {asked}"
    assert said(Own(model.parameters())) == "Own: its own step, as it stands"


def test_an_optimizer_of_your_own_is_acted_out_and_not_touched():
    class Own(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {})
            self.norms = []

        @torch.no_grad()
        def step(self, closure=None):
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter].setdefault("average", parameter.clone()).lerp_(parameter, 0.1)
                self.norms.append(parameter.grad.norm().item())
                if self.norms[-1] > 0:
                    parameter.sub_(parameter.grad * 0.1)

    model = dense_net()
    optimizer = Own(model.parameters())
    report = predict_memory(model, DIGITS, cross_entropy_sum, optimizer, micro_batch_size=4)
    assert optimizer.norms == []
    assert not optimizer.state
    meter = measured(model, DIGITS, cross_entropy_sum, optimizer, 4)
    assert report.at_peak == meter.at_peak


def test_a_smaller_last_of_many_micro_batches_hides_one_number_at_most():
    for name in ("dense", "float64", "GPT", "weight norm", "batch norm"):
        model, batch, loss_sum, count = build(name)
        optimizer = sgd(model.parameters())
        report = predict_memory(model, batch, loss_sum, optimizer, micro_batch_size=5)
        meter = measured(model, batch, loss_sum, optimizer, 5, count)
        one_number = 8 if name == "float64" else 4
        assert meter.peak_bytes - one_number <= report.peak_bytes <= meter.peak_bytes, name


def test_many_micro_batches_are_predicted_from_two_to_the_byte():
    model = dense_net()
    optimizer = sgd(model.parameters())
    predictor = MemoryPredictor(model, DIGITS, cross_entropy_sum, optimizer)
    for size in (1, 2, 3, 12, 1):  # in any order, the same object
        meter = measured(model, DIGITS, cross_entropy_sum, optimizer, size)
        assert predictor.predict(size).at_peak == meter.at_peak
    report = predictor.predict(1)
    assert (report.micro_batch_size, report.accumulation_steps) == (1, 12)


def test_what_a_micro_batch_leaves_behind_is_there_in_the_next_one():
    model, batch, loss_sum, _ = build("weight norm")
    predictor = MemoryPredictor(model, batch, loss_sum, sgd(model.parameters()))
    first = predictor.predict(4)
    assert predictor._fake.graph_keeps_bytes  # the old weight norm keeps its product in an attribute
    assert predictor.predict(4) == first


def test_the_parts_are_what_they_say():
    model = dense_net()
    optimizer = torch.optim.AdamW(model.parameters())
    report = predict_memory(model, DIGITS, cross_entropy_sum, optimizer, micro_batch_size=5)
    parameter_bytes, steps = 35_880, 6 * 4
    inputs = 12 * 64 * 4 + 12 * 8
    assert report.resident_bytes == 3 * parameter_bytes + steps + inputs
    assert report.peak_bytes == max(report.pass_peak_bytes, report.step_peak_bytes) == report.needed_bytes
    assert report.step_peak_bytes == report.resident_bytes + parameter_bytes + 2 * 64 * 64 * 4 + 64 * 4
    assert report.at_peak["optimizer_state"] == 2 * parameter_bytes + steps


def test_a_size_above_the_batch_gives_one_micro_batch():
    model = dense_net()
    reports = [
        predict_memory(model, DIGITS, cross_entropy_sum, sgd(model.parameters()), micro_batch_size=size)
        for size in (12, 13, 10**9, np.int64(12))
    ]
    assert all(report == reports[0] for report in reports)
    assert (reports[0].micro_batch_size, reports[0].accumulation_steps) == (12, 1)


def test_a_loss_that_uses_the_model_past_its_argument_is_predicted_all_the_same():
    model = dense_net()
    optimizer = torch.optim.AdamW(model.parameters())

    class Trainer:
        def __init__(self):
            self.model, self.calls = model, 0

        def loss(self, _, micro_batch):
            self.calls += 1
            return cross_entropy_sum(self.model, micro_batch)

    trainer = Trainer()
    direct = predict_memory(model, DIGITS, cross_entropy_sum, optimizer, micro_batch_size=4)
    for loss_sum in (lambda _, micro_batch: cross_entropy_sum(model, micro_batch), trainer.loss):
        assert predict_memory(model, DIGITS, loss_sum, optimizer, micro_batch_size=4) == direct
    assert trainer.calls == 0
    assert all(parameter.grad is None for parameter in model.parameters())


# ---------------------------------------------------------------------------------------------------------------------
# The moment


@pytest.mark.parametrize(
    ("name", "make", "micro_batch_size", "words"),
    [
        ("dense", torch.optim.AdamW, 4, "the optimizer's step"),
        ("dense", sgd, 12, "backward of the first linear layer (1)"),
        ("dense", sgd, 4, "backward of the 2nd linear layer (3), from the second micro-batch on"),
        ("GPT with dropout, untied", sgd, 12, "backward of the 8th linear layer (blocks.1.contract)"),
        ("GRU", sgd, 12, "forward of the GRU layer (body)"),
        ("checkpoints", sgd, 12, "backward of the first dropout (blocks.0.2)"),
    ],
)
def test_the_moment_of_the_peak_is_named(name, make, micro_batch_size, words):
    model, batch, loss_sum, _ = build(name)
    report = predict_memory(model, batch, loss_sum, make(model.parameters()), micro_batch_size=micro_batch_size)
    assert report.peak_moment == words


def test_the_moment_may_be_in_the_loss_in_a_gradient_or_in_what_is_computed_again():
    def moment(model, batch, loss_sum=cross_entropy_sum):
        return predict_memory(model, batch, loss_sum, sgd(model.parameters()), micro_batch_size=12).peak_moment

    wide = nn.Sequential(nn.Flatten(), nn.Linear(64, 1000, bias=False))
    assert moment(wide, (draw(12, 64), draw(12, high=1000))).endswith("linear layer (1)")
    assert moment(nn.Linear(4, 3000, bias=False), (draw(12, 4), draw(12, high=3000))) == "backward of the loss"

    def forward_only(model, micro_batch):
        return (model(micro_batch[0]).detach().repeat(50, 1).sum() + model(micro_batch[0]).sum()) * 1.0

    assert moment(nn.Linear(64, 10), (draw(12, 64), LABELS), forward_only) == "forward of the loss"

    def block(inputs):
        return (inputs.repeat(1, 200) @ torch.ones(64 * 200, 1)) * inputs

    class Again(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.last = Odd(block), nn.Linear(64, 10)
            self.inner.body = nn.Linear(64, 64)

        def forward(self, inputs):
            return self.last(checkpoint(self.inner, inputs, use_reentrant=False))

    assert moment(Again(), (draw(12, 64), LABELS)).startswith("backward")


# ---------------------------------------------------------------------------------------------------------------------
# Nothing is touched


def everything(model, optimizer, batch):
    """All that a prediction might change."""
    modules = list(model.modules())
    return {
        "values": copy.deepcopy((model.state_dict(), optimizer.state_dict())),
        "identities": [id(t) for t in (*model.parameters(), *model.buffers())],
        "types": [type(t) for t in (*model.parameters(), *model.buffers())],
        "gradients": [id(p.grad) for p in model.parameters()],
        "versions": [t._version for t in (*model.parameters(), *model.buffers(), *batch)],
        "training": [module.training for module in modules],
        "hooks": [len(v) for m in modules for k, v in vars(m).items() if "hooks" in k and isinstance(v, dict)],
        "optimizer": [id(p) for group in optimizer.param_groups for p in group["params"]],
        "random": torch.get_rng_state().tolist(),
        "python": random.getstate(),
        "numpy": np.random.get_state()[1].tolist(),
        "dtype": torch.get_default_dtype(),
        "grad mode": torch.is_grad_enabled(),
        "modes": len(_get_current_dispatch_mode_stack()),
        "saved tensors": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "kept": (getattr(model, "calls", None), len(getattr(model, "seen", []))),
    }


def assert_same(before, after):
    (state, optimizer_state), (state_after, optimizer_state_after) = before.pop("values"), after.pop("values")
    assert before == after
    assert all(torch.equal(state[name], state_after[name]) for name in state)
    assert str(optimizer_state) == str(optimizer_state_after)


@pytest.mark.parametrize("name", ["experts", "batch norm", "GPT with dropout, untied", "reentrant checkpoints"])
@pytest.mark.parametrize("options", [{}, {"scratch": True}])
def test_a_prediction_changes_nothing(name, options):
    model, batch, loss_sum, _ = build(name)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    model.eval()
    model.train()
    next(model.children()).eval()
    before = everything(model, optimizer, batch)
    predict_memory(model, batch, loss_sum, optimizer, micro_batch_size=4, **options)
    assert_same(before, everything(model, optimizer, batch))


class Interrupting(TorchDispatchMode):
    """Raises at the n-th operation."""

    def __init__(self, at, error):
        super().__init__()
        self.left, self.error = at, error

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # Where PyTorch asks a fake tensor for its device, an exception would end the process.
        self.left -= func is not torch.ops.prim.device.default
        if self.left == 0:
            raise self.error
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("how", ["on fakes", "measured", "for scratch"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError("no")])
def test_all_is_as_before_after_an_interrupt_at_any_operation(how, error):
    def act(scores):
        random.random()
        torch.set_default_dtype(torch.float64)
        if how == "measured":
            scores = scores * scores.sum().item()
        return scores

    model = nn.Sequential(Odd(act), nn.BatchNorm1d(10))
    optimizer = torch.optim.AdamW(model.parameters())

    at = 0

    def loss_sum(model, micro_batch):
        with Interrupting(at, error):
            return cross_entropy_sum(model, micro_batch)

    before = everything(model, optimizer, DIGITS)
    for operation in (1, 2, 5, 9, 14):
        at = operation
        with pytest.raises(KeyboardInterrupt if error is KeyboardInterrupt else ValueError):
            predict_memory(model, DIGITS, loss_sum, optimizer, micro_batch_size=4, scratch=how == "for scratch")
        assert_same(dict(before), everything(model, optimizer, DIGITS))


@pytest.mark.parametrize("scratch", [False, True])
def test_all_is_as_before_after_an_interrupt_in_backward_and_in_the_step(scratch):
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, scores):
            return scores.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise KeyboardInterrupt

    class Stopping(torch.optim.SGD):
        def step(self, closure=None):
            super().step()
            raise KeyboardInterrupt

    for model, make in ((Odd(Broken.apply), sgd), (dense_net(), Stopping)):
        optimizer = make(model.parameters())
        before = everything(model, optimizer, DIGITS)
        with pytest.raises(KeyboardInterrupt):
            predict_memory(model, DIGITS, cross_entropy_sum, optimizer, micro_batch_size=4, scratch=scratch)
        assert_same(before, everything(model, optimizer, DIGITS))


@pytest.mark.parametrize("at_the_end", [False, True])
def test_an_interrupt_by_signal_waits_for_the_next_operation_and_then_all_is_as_before(at_the_end):
    ran = []

    def act(scores):
        if not at_the_end:
            signal.raise_signal(signal.SIGINT)
        ran.append(1)  # between two operations nothing is cut short
        return scores * 2

    class Signalling(torch.optim.SGD):
        def step(self, closure=None):
            super().step()
            if at_the_end:
                signal.raise_signal(signal.SIGINT)

    model = Odd(act)
    optimizer = Signalling(model.parameters())
    before, handler = everything(model, optimizer, DIGITS), signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        predict_memory(model, DIGITS, cross_entropy_sum, optimizer, micro_batch_size=4)
    assert ran
    assert signal.getsignal(signal.SIGINT) is handler
    assert_same(before, everything(model, optimizer, DIGITS))
    call()  # the interrupt was used up


def test_hooks_of_the_learner_are_left_out_and_named():
    model, calls = dense_net(), []
    model[1].register_forward_hook(lambda *_: calls.append(1))
    model[3].weight.register_hook(lambda gradient: calls.append(2))
    report = predict_memory(model, DIGITS, cross_entropy_sum, sgd(model.parameters()), micro_batch_size=4)
    assert calls == []
    assert report.assumptions[1:] == ("hooks are left out: 1", "hooks of parameters are left out")


def test_a_prediction_inside_a_meter_or_a_budget_is_not_counted_and_may_be_larger_than_the_budget():
    model = dense_net()
    optimizer = torch.optim.AdamW(model.parameters())
    expected = predict_memory(model, DIGITS, cross_entropy_sum, optimizer, micro_batch_size=4)
    with measure_memory(model) as meter, memory_budget(36_000, model):
        found = predict_memory(model, DIGITS, cross_entropy_sum, optimizer, micro_batch_size=4)
    assert found == expected
    assert meter.peak_bytes == 35_880
    with torch.no_grad():
        assert predict_memory(model, DIGITS, cross_entropy_sum, optimizer, micro_batch_size=4) == expected


def test_a_scheduler_and_its_optimizer_take_no_step():
    model = dense_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    steps = []
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    predict_memory(model, DIGITS, cross_entropy_sum, optimizer, micro_batch_size=4)
    assert steps == []
    assert scheduler.last_epoch == 0
    assert not getattr(optimizer, "_opt_called", False)


# ---------------------------------------------------------------------------------------------------------------------
# Without data


def test_a_model_on_meta_has_the_same_prediction():
    tokens = torch.empty(12, 7, dtype=torch.long, device="meta")
    for make in (sgd, torch.optim.AdamW, torch.optim.Adafactor):
        with torch.device("meta"):
            on_meta = small_gpt()
            optimizer = make(on_meta.parameters())
            found = predict_memory(on_meta, (tokens, tokens), token_cross_entropy_sum, optimizer, micro_batch_size=4)
        real = small_gpt()
        expected = predict_memory(
            real, (TOKENS, TOKENS), token_cross_entropy_sum, make(real.parameters()), micro_batch_size=4
        )
        expected_inputs = expected.at_peak["inputs"]
        assert found.at_peak | {"inputs": expected_inputs} == expected.at_peak
        assert (expected_inputs, found.at_peak["inputs"]) == (12 * 7 * 8, 12 * 7 * 8)
        assert all(p.is_meta and p.grad is None for p in on_meta.parameters())


def test_a_model_that_does_not_fit_here_is_predicted_without_its_memory():
    with torch.device("meta"):
        model = SmallGPT(50_257, context=1024, width=4096, heads=32, depth=2, tied_head=False)
    tokens = torch.empty(64, 1024, dtype=torch.long, device="meta")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    optimizer = torch.optim.AdamW(model.parameters())
    report = predict_memory(model, (tokens, tokens), token_cross_entropy_sum, optimizer, micro_batch_size=8)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024  # KiB
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    assert report.peak_bytes > 16 * num_parameters > 10 * 2**30


def test_on_cuda_sizes_are_rounded_up_by_arithmetic():
    layer = nn.Linear(3, 2, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)

    def loss_sum(model, micro_batch):
        return model(micro_batch).exp().sum()  # exp keeps its result

    report = predict_memory(layer, draw(300, 3), loss_sum, optimizer, micro_batch_size=300, device="cuda")
    assert report.at_peak["parameters"] == report.at_peak["optimizer_state"] == 512
    assert report.at_peak["inputs"] == 4096  # 3600 bytes
    assert report.at_peak["activations"] == 2560  # 2400 bytes
    assert report.device == "cuda"
    assert "CUDA by arithmetic, not measured" in str(report)
    plain = predict_memory(layer, draw(300, 3), loss_sum, optimizer, micro_batch_size=300, device="cpu")
    assert (plain.at_peak["inputs"], plain.device) == (3600, "cpu")


def test_on_cuda_adamw_is_foreach_and_dropout_keeps_a_byte():
    model = dense_net(hidden=(128,) * 8)  # foreach holds a copy of all, the loop two of one layer
    optimizer = torch.optim.AdamW(model.parameters())
    cpu, cuda = (
        predict_memory(model, DIGITS, cross_entropy_sum, optimizer, micro_batch_size=4, device=device)
        for device in ("cpu", "cuda")
    )
    parameter_bytes = sum(p.numel() * 4 for p in model.parameters())
    assert cuda.step_peak_bytes - cpu.step_peak_bytes > 0.5 * parameter_bytes
    assert cpu.peak_moment == cuda.peak_moment == "the optimizer's step"
    with _LikeOnCuda():
        dropped = functional.dropout(torch.ones(100, requires_grad=True), 0.5)
        untouched = functional.dropout(torch.ones(100), 0.5, training=False)
    kept = [t for t in (getattr(dropped.grad_fn, "_saved_result1", None),) if t is not None]
    assert kept[0].dtype == torch.bool
    assert torch.equal(untouched, torch.ones(100))


# ---------------------------------------------------------------------------------------------------------------------
# What can't be traced, and scratch


def item(scores):
    return scores * scores.abs().max().item()


def branch(scores):
    return scores * 2 if scores.sum() > 0 else scores


def mask(scores):
    return scores + scores[scores > 0].sum()


def nonzero(scores):
    return scores * len((scores > 0).nonzero())


def to_numpy(scores):
    return scores * float(scores.detach().numpy().max())


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (item, r"\.item\(\) \(or if"),
        (branch, r"\.item\(\) \(or if"),
        (mask, "a boolean mask as an index"),
        (nonzero, "nonzero"),
        (to_numpy, "numpy"),
    ],
)
def test_what_cannot_be_traced_is_measured_and_the_report_says_so(act, words):
    for micro_batch_size in (12, 7, 4):
        for make in (sgd, torch.optim.AdamW):
            model = nn.Sequential(Odd(act), nn.BatchNorm1d(10))
            optimizer = make(model.parameters())
            before = everything(model, optimizer, DIGITS)
            report = predict_memory(model, DIGITS, cross_entropy_sum, optimizer, micro_batch_size=micro_batch_size)
            assert_same(before, everything(model, optimizer, DIGITS))
            assert report.measured
            assert re.match("measured on real micro-batches, not predicted: .* in 0 ", report.assumptions[0])
            assert re.search(words, report.assumptions[0])
            assert str(report).startswith("measured peak")
            meter = measured(model, DIGITS, cross_entropy_sum, optimizer, micro_batch_size)
            assert report.at_peak == meter.at_peak


def test_without_data_what_cannot_be_traced_is_an_error_that_names_it():
    with torch.device("meta"):
        model = Odd(item)
    with pytest.raises(ValueError, match=r"without data: \.item\(\).*in its own forward \(Odd\) needs numbers"):
        predict_memory(model, DIGITS, cross_entropy_sum, sgd(model.parameters()), micro_batch_size=4)
    with pytest.raises(ValueError, match="scratch=True runs a real micro-batch"):
        predict_memory(model, DIGITS, cross_entropy_sum, sgd(model.parameters()), micro_batch_size=4, scratch=True)
    real = Odd(item)
    with pytest.raises(ValueError, match="can't be predicted for 'cuda'"):
        predict_memory(real, DIGITS, cross_entropy_sum, sgd(real.parameters()), micro_batch_size=4, device="cuda")


@pytest.mark.parametrize("micro_batch_size", [12, 7, 4])
def test_scratch_is_what_the_allocator_took_more_in_a_real_pass(micro_batch_size):
    model = conv_net(channels=8, depth=2)
    optimizer = sgd(model.parameters())
    report = predict_memory(
        model, DIGITS, cross_entropy_sum, optimizer, micro_batch_size=micro_batch_size, scratch=True
    )
    update_parameters(model, optimizer, split_batch(DIGITS, micro_batch_size), cross_entropy_sum)
    with measure_memory(model, optimizer, DIGITS, scratch=True) as meter:
        update_parameters(model, optimizer, split_batch(DIGITS, micro_batch_size), cross_entropy_sum)
    assert report.scratch_bytes > 500
    assert abs(report.needed_bytes - (meter.peak_bytes + meter.scratch_bytes)) <= 0.01 * meter.peak_bytes
    assert "kernel scratch" in str(report)
    assert any("convolutions" in assumption for assumption in report.assumptions)


def test_an_lstm_is_flagged_and_its_workspace_is_scratch():
    model = Reader(nn.LSTM(16, 16, batch_first=True))
    optimizer = sgd(model.parameters())
    plain, calibrated = (
        predict_memory(model, READING, cross_entropy_sum, optimizer, micro_batch_size=4, scratch=scratch)
        for scratch in (False, True)
    )
    assert any(assumption.startswith("LSTM (body): its kernel takes scratch") for assumption in plain.assumptions)
    meter = measured(model, READING, cross_entropy_sum, optimizer, 4)
    assert plain.peak_bytes < 0.9 * meter.peak_bytes <= 0.9 * calibrated.needed_bytes
    dense = dense_net()
    report = predict_memory(dense, DIGITS, cross_entropy_sum, sgd(dense.parameters()), micro_batch_size=4)
    assert report.assumptions == ("SGD: for-loop implementation, as on a CPU",)
    assert report.scratch_bytes is None


# ---------------------------------------------------------------------------------------------------------------------
# Refused


def outputs_and_inputs(scores):
    return scores, scores


@pytest.mark.parametrize("size", [0, -3])
def test_a_micro_batch_size_below_1_is_refused(size):
    with pytest.raises(ValueError, match=f"micro_batch_size must be at least 1; got {size}"):
        call(micro_batch_size=size)


@pytest.mark.parametrize("size", [True, 2.5, "4", None])
def test_a_micro_batch_size_that_is_no_whole_number_is_refused(size):
    with pytest.raises(TypeError, match="micro_batch_size must be a whole number"):
        call(micro_batch_size=size)


def call(model=None, batch=DIGITS, loss_sum=cross_entropy_sum, optimizer=None, micro_batch_size=4, **options):
    model = dense_net() if model is None else model
    optimizer = sgd(model.parameters()) if optimizer is None else optimizer
    return predict_memory(model, batch, loss_sum, optimizer, micro_batch_size=micro_batch_size, **options)


@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        ({"model": 3, "optimizer": 3}, TypeError, "model must be a torch.nn.Module; got int"),
        ({"optimizer": 3}, TypeError, "optimizer must be a torch.optim.Optimizer; got int"),
        ({"loss_sum": 3}, TypeError, "loss_sum must be a function; got int"),
        ({"device": "tpu"}, ValueError, "device must be 'cpu', 'cuda' or None; got 'tpu'"),
        ({"scratch": 1}, TypeError, "scratch must be True or False; got 1"),
        ({"scratch": True, "device": "cuda"}, ValueError, "scratch=True reads the CPU's allocator"),
        ({"batch": (IMAGES[:0], LABELS[:0])}, ValueError, "batch has 0 samples"),
        ({"batch": ()}, ValueError, "batch holds no tensor"),
        ({"batch": (IMAGES, LABELS[:3])}, ValueError, r"disagree in length: \[12, 3\]"),
        ({"optimizer": sgd(dense_net().parameters())}, ValueError, "optimizer holds none of model's trainable"),
        ({"model": dense_net().requires_grad_(False)}, ValueError, "model has no trainable parameters"),
        ({"model": nn.LazyLinear(10)}, ValueError, "parameters without a size; run a lazy module once"),
        (
            {"loss_sum": lambda m, b: functional.cross_entropy(m(b[0]), b[1], reduction="none")},
            ValueError,
            r"loss_sum must return a scalar tensor, the sum over items; got shape \(4,\)",
        ),
        ({"loss_sum": lambda m, b: 3.0}, TypeError, "loss_sum must return a scalar tensor .*; it returned 3.0"),
        ({"loss_sum": lambda m, b: m(b[0]).detach().sum()}, ValueError, "a loss without a gradient"),
        (
            {"model": Odd(outputs_and_inputs)},
            ValueError,
            "loss_sum failed on what model returned, a tuple of 2 outputs: AttributeError",
        ),
        (
            {"model": nn.Sequential(nn.Flatten(), nn.Sequential(nn.Linear(64, 8), nn.Linear(9, 10)))},
            ValueError,
            r"model failed in 1\.1 \(Linear\): RuntimeError: .*\[4, 8\] X \[9, 10\]",
        ),
        (
            {"model": Odd(lambda scores: scores + torch.zeros(10, device="cuda"))},
            ValueError,
            r"aten\.zeros.* asks for device 'cuda'; model is on 'cpu'",
        ),
        (
            {"loss_sum": lambda m, b: cross_entropy_sum(m, b) + nn.Linear(2, 1)(torch.ones(2)).sum() + OUTSIDE.sum()},
            ValueError,
            r"a trainable tensor of shape \(3,\) is used that is neither model's nor optimizer's",
        ),
    ],
)
def test_what_cannot_be_predicted_is_refused_by_name(given, kind, words, capfd):
    if isinstance(given.get("model"), nn.LazyLinear):
        given = given | {"optimizer": torch.optim.SGD(given["model"].parameters())}
    with pytest.raises(kind, match=words):
        call(**given)
    assert capfd.readouterr().err == ""
    assert OUTSIDE.grad is None


OUTSIDE = torch.ones(3, requires_grad=True)


def test_an_optimizer_that_needs_a_closure_is_refused():
    model = dense_net()
    with pytest.raises(ValueError, match="LBFGS needs a closure"):
        call(model, optimizer=torch.optim.LBFGS(model.parameters()))


def test_a_step_that_fails_is_refused_by_name():
    class Broken(torch.optim.SGD):
        def step(self, closure=None):
            raise ZeroDivisionError("no rate")

    model = dense_net()
    with pytest.raises(ValueError, match="the step of optimizer Broken failed: ZeroDivisionError: no rate"):
        call(model, optimizer=Broken(model.parameters()))


def test_a_report_prints_as_a_table_without_anything_that_changes_from_run_to_run():
    model = dense_net(hidden=(2048,))
    report = call(model, optimizer=torch.optim.AdamW(model.parameters()))
    assert isinstance(report, MemoryReport)
    assert str(report) == str(call(model, optimizer=torch.optim.AdamW(model.parameters())))
    assert str(report).splitlines() == [
        "predicted peak             CPU",
        "------------------------------",
        "parameters           600.0 KiB",
        "buffers                    0 B",
        "gradients            600.0 KiB",
        "optimizer state        1.2 MiB",
        "activations                0 B",
        "inputs                 3.1 KiB",
        "temporaries            1.0 MiB",
        "------------------------------",
        "peak                   3.3 MiB",
        "------------------------------",
        "at: the optimizer's step",
        "micro-batch size 4, 3 accumulation steps",
        "assumed: AdamW: for-loop implementation, as on a CPU",
    ]
