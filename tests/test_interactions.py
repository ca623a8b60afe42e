"""What looks across samples is found and named, what does not is left in peace, and the model is as it was."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from course_lib.accumulation import accumulate_gradients
from course_lib.batches import split_batch
from course_lib.datasets import load_digits
from course_lib.gradients import compare_gradients, copy_gradients
from course_lib.interactions import Interaction, cross_sample_layers, differ, find_interactions, replace_batch_norm
from course_lib.losses import cross_entropy_sum, squared_error_sum, token_cross_entropy_sum
from course_lib.memory import measure_memory
from course_lib.models import SmallGPT, conv_net, dense_net


def digits(dtype=torch.float32, size=16):
    return load_digits(dtype).first(size)


def net(*layers, width=32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), *layers, nn.Linear(width, 10))


class Lambda(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


def layers_found(model, batch=None, loss_sum=cross_entropy_sum):
    return [found.layer for found in find_interactions(model, batch or digits(), loss_sum)]


# ---- what can be cut -------------------------------------------------------------------------------------------------


class TimeFirst(nn.Module):
    """Layers that take (T, B, ...), with as many steps as samples in the runs: 8 rows of 8 pixels."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.recurrent, self.attention = nn.LSTM(8, 16), nn.MultiheadAttention(16, 2)
        self.head = nn.Linear(16, 10)

    def forward(self, images):
        steps, _ = self.recurrent(images[:, 0].transpose(0, 1))
        mixed, _ = self.attention(steps, steps, steps)
        return self.head(mixed[-1])


SEPARATE = {
    "dense": lambda: dense_net(),
    "convolutional": lambda: conv_net(channels=8, depth=2),
    "dropout in two layers": lambda: net(nn.Dropout(0.5), nn.ReLU(), nn.Dropout(0.3)),
    "layer norm": lambda: net(nn.LayerNorm(32)),
    "group norm": lambda: net(nn.GroupNorm(4, 32)),
    "batch norm in evaluation mode": lambda: net(nn.BatchNorm1d(32)).eval(),
    "a frozen batch norm in a model that trains": lambda: net(nn.BatchNorm1d(32).eval()),
    "layers that write over their input": lambda: net(nn.ReLU(inplace=True), nn.Tanh(), nn.Dropout(0.5, inplace=True)),
    "spectral normalisation": lambda: net(torch.nn.utils.parametrizations.spectral_norm(nn.Linear(32, 32))),
    "time before samples": TimeFirst,
    "minus infinity on the way": lambda: net(Lambda(lambda x: x.masked_fill(x < 0, -torch.inf)), nn.Softmax(1)),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("model", SEPARATE)
def test_what_treats_each_sample_alone_is_left_in_peace(model, dtype):
    assert find_interactions(SEPARATE[model]().to(dtype), digits(dtype), cross_entropy_sum) == []


def test_tokens_flattened_into_one_dimension_are_told_apart():
    tokens = torch.randint(17, (16, 8), generator=torch.Generator().manual_seed(0))
    targets = tokens.clone()
    targets[::3, 4:] = -100
    model = SmallGPT(17, context=8, width=16, heads=2, depth=1, dropout=0.1)
    assert find_interactions(model, (tokens, targets), token_cross_entropy_sum) == []
    flat = nn.Sequential(nn.Embedding(17, 8), nn.Flatten(0, 1), nn.Linear(8, 17), nn.Unflatten(0, (-1, 8)))
    assert find_interactions(flat, (tokens, targets), token_cross_entropy_sum) == []


# ---- what cannot -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_batch_norm_is_named_not_only_the_first(dtype):
    model = net(nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32), nn.BatchNorm1d(32)).to(dtype)
    assert layers_found(model, digits(dtype)) == ["2", "5"]
    assert cross_sample_layers(model) == ["2", "5"]


ACROSS = {
    "the mean taken away": lambda x: x - x.mean(0),
    "the largest taken": lambda x: x - x.amax(0),
    "sorted": lambda x: x.sort(0).values,
    "rolled": lambda x: x.roll(1, 0),
    "softmax over the batch": lambda x: x.softmax(0),
    "divided by the length of all": lambda x: x / x.norm(),
    "neighbours mixed in the last dimension after a transpose": lambda x: x.T.softmax(-1).T,
}


@pytest.mark.parametrize("function", ACROSS)
def test_a_layer_of_any_class_is_named(function):
    found = find_interactions(net(Lambda(ACROSS[function]), nn.Tanh()), digits(), cross_entropy_sum)
    assert found == [Interaction("2", "Lambda")]
    assert str(found[0]) == "layer 2 (Lambda) looks across samples: what it gives for one depends on the others"


def test_what_stands_in_a_forward_is_named_by_the_module_it_stands_in():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = dense_net()

        def forward(self, images):
            scores = self.inner(images)
            return scores - scores.mean(0)

    assert find_interactions(Own(), digits(), cross_entropy_sum) == [Interaction("", "Own")]
    assert "the model's own forward (Own)" in str(Interaction("", "Own"))
    deep = nn.Sequential(Own(), nn.ReLU())
    assert layers_found(deep) == ["0"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_few_units_in_the_last_place_are_no_difference(dtype):
    before, nothing_fresh = torch.ones(4, dtype=dtype), torch.zeros(4, dtype=torch.bool)
    eps = torch.finfo(dtype).eps
    assert not differ(before * (1 + 4 * eps), before, nothing_fresh)
    assert differ(before * (1 + 16 * eps), before, nothing_fresh)
    assert not differ(before * 2, before, ~nothing_fresh)


def test_a_layer_used_twice_is_named_once():
    shared = nn.BatchNorm1d(32)
    assert layers_found(net(shared, nn.ReLU(), shared)) == ["2"]


def scores_of(model, micro_batch):
    return model(micro_batch[0])


def info_nce(model, micro_batch):
    ours = functional.normalize(scores_of(model, micro_batch), dim=1)
    return functional.cross_entropy(ours @ ours.roll(1, 1).T, torch.arange(len(ours)))


def dice(model, micro_batch):
    marked, wanted = scores_of(model, micro_batch)[:, 0].sigmoid(), (micro_batch[1] < 5).float()
    return 1 - 2 * (marked * wanted).sum() / (marked.sum() + wanted.sum())


def load_balance(model, micro_batch):
    probabilities = scores_of(model, micro_batch).softmax(1)
    share = functional.one_hot(probabilities.argmax(1), 10).float().mean(0)
    weak = 0.01 * 10 * (share * probabilities.mean(0)).sum() * len(share)
    return cross_entropy_sum(model, micro_batch) + weak


def root_mean_square(model, micro_batch):
    return scores_of(model, micro_batch).square().mean().sqrt()


def divided_by_a_count_of_the_batch(model, micro_batch):
    scores, targets = scores_of(model, micro_batch), micro_batch[1]
    return functional.cross_entropy(scores, targets.masked_fill(targets > 6, -100))


@pytest.mark.parametrize("loss", [info_nce, dice, load_balance, root_mean_square, divided_by_a_count_of_the_batch])
def test_a_loss_across_samples_is_named(loss):
    assert find_interactions(dense_net(), digits(), loss) == [Interaction(None, loss.__name__)]
    assert f"the loss {loss.__name__} is not a sum" in str(Interaction(None, loss.__name__))


def test_layer_and_loss_are_named_apart():
    assert layers_found(net(nn.BatchNorm1d(32)), loss_sum=info_nce) == ["2", None]


def test_a_mean_over_samples_is_no_interaction_and_terms_of_a_dict_count_together():
    assert layers_found(dense_net(), loss_sum=lambda m, part: cross_entropy_sum(m, part) / len(part[1])) == []

    def terms(model, part):
        return {"a": cross_entropy_sum(model, part), "b": info_nce(model, part)}

    assert layers_found(dense_net(), loss_sum=terms) == [None]


@pytest.mark.parametrize("size", [4, 5, 7, 8, 31, 64])
def test_any_number_of_samples_from_four_on_will_do(size):
    assert layers_found(net(nn.BatchNorm1d(32)), digits(size=size)) == ["2"]
    assert layers_found(dense_net(), digits(size=size)) == []


def test_what_is_found_is_what_breaks_the_equality():
    for model, loss in ((net(nn.BatchNorm1d(32)), cross_entropy_sum), (dense_net(), cross_entropy_sum)):
        model.double()
        batch = digits(torch.float64)
        accumulate_gradients(model, [batch], loss)
        whole = copy_gradients(model)
        model.zero_grad()
        accumulate_gradients(model, split_batch(batch, 4), loss)
        assert compare_gradients(whole, model).agree(1e-12) == (find_interactions(model, batch, loss) == [])


# ---- no traces -------------------------------------------------------------------------------------------------------


def test_nothing_is_changed():
    model = net(nn.BatchNorm1d(32), nn.Dropout(0.5))
    model[4].eval()
    accumulate_gradients(model, [digits()], cross_entropy_sum)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    gradients, modes = copy_gradients(model), [module.training for module in model.modules()]
    state, batch = torch.get_rng_state(), digits()
    find_interactions(model, batch, cross_entropy_sum)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(torch.equal(gradients[name], value) for name, value in copy_gradients(model).items())
    assert [module.training for module in model.modules()] == modes
    assert all(not module._forward_hooks for module in model.modules())
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(batch[0], digits()[0])


def test_an_error_in_the_loss_leaves_no_traces():
    model, state = net(nn.BatchNorm1d(32)), torch.get_rng_state()

    def failing(model, part):
        model(part[0])
        raise KeyError("later")

    with pytest.raises(KeyError):
        find_interactions(model, digits(), failing)
    assert all(not module._forward_hooks for module in model.modules())
    assert int(model[2].num_batches_tracked) == 0
    assert torch.equal(torch.get_rng_state(), state)


def test_a_meter_does_not_count_it():
    model, batch = dense_net(), digits()
    with measure_memory(model, batch) as meter:
        find_interactions(model, batch, cross_entropy_sum)
    assert meter.at_peak["activations"] + meter.at_peak["temporaries"] == 0


def test_inside_an_autocast_block_a_later_pass_has_gradients():
    model, batch = dense_net(), digits()
    with torch.autocast("cpu", torch.bfloat16):
        assert find_interactions(model, batch, cross_entropy_sum) == []
        accumulate_gradients(model, [batch], cross_entropy_sum)
    assert len(copy_gradients(model)) == len(list(model.parameters()))


def test_a_compiled_model_is_looked_into():
    model = net(nn.BatchNorm1d(32))
    assert layers_found(torch.compile(model, backend="eager")) == ["2"]


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"model": "net"}, TypeError, "model must be"),
        ({"loss_sum": 3}, TypeError, "loss_sum must be a function"),
        ({"loss_sum": lambda m, part: 3.0}, TypeError, "loss_sum must return a scalar tensor"),
        ({"loss_sum": lambda m, part: m(part[0])}, TypeError, "loss_sum must return a scalar tensor"),
        ({"loss_sum": lambda m, part: m(part[0]).sum() / 0}, ValueError, "loss_sum must be finite"),
        ({"batch": digits(size=3)}, ValueError, "batch must have at least 4 samples"),
        ({"batch": (torch.zeros(4, 1), torch.zeros(5))}, ValueError, "disagree in length"),
    ],
)
def test_what_cannot_be_looked_into_is_refused(arguments, kind, words):
    given = {"model": dense_net(), "batch": digits(), "loss_sum": cross_entropy_sum} | arguments
    with pytest.raises(kind, match=words):
        find_interactions(**given)


# ---- names and replacements ------------------------------------------------------------------------------------------


def test_known_layers_are_named_by_the_mode_they_are_in():
    model = nn.Sequential(nn.BatchNorm2d(4), nn.Sequential(nn.SyncBatchNorm(4), nn.LazyBatchNorm1d()), nn.LayerNorm(4))
    assert cross_sample_layers(model) == ["0", "1.0", "1.1"]
    model[0].eval()
    assert cross_sample_layers(model) == ["1.0", "1.1"]
    assert cross_sample_layers(model.eval()) == []
    without_statistics = nn.BatchNorm2d(4, track_running_stats=False).eval()
    assert cross_sample_layers(without_statistics) == [""]
    with pytest.raises(TypeError, match="model must be"):
        cross_sample_layers([nn.BatchNorm1d(2)])


def test_group_norm_takes_the_place_of_every_batch_norm_in_a_copy():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16, eps=1e-3), nn.Sequential(nn.ReLU(), nn.BatchNorm2d(16))
    )
    model.append(nn.Flatten()).append(nn.Linear(576, 10)).double()
    nn.init.uniform_(model[1].weight)
    mended = replace_batch_norm(model, num_groups=4)
    assert isinstance(model[1], nn.BatchNorm2d)
    assert isinstance(mended[1], nn.GroupNorm)
    assert isinstance(mended[2][1], nn.GroupNorm)
    assert (mended[1].num_groups, mended[1].num_channels, mended[1].eps) == (4, 16, 1e-3)
    assert torch.equal(mended[1].weight, model[1].weight)
    assert mended[1].weight is not model[1].weight
    assert {parameter.dtype for parameter in mended.parameters()} == {torch.float64}
    assert find_interactions(mended, digits(torch.float64), cross_entropy_sum) == []
    reference = {}
    for size in (16, 4, 1):
        mended.zero_grad()
        accumulate_gradients(mended, split_batch(digits(torch.float64), size), cross_entropy_sum)
        reference = reference or copy_gradients(mended)
        assert compare_gradients(reference, mended).agree(1e-12)


def test_a_batch_norm_without_scale_and_a_model_that_is_one_are_replaced_too():
    mended = replace_batch_norm(nn.BatchNorm1d(8, affine=False).eval(), num_groups=2)
    assert isinstance(mended, nn.GroupNorm)
    assert mended.weight is None
    assert not mended.training
    shared = nn.BatchNorm1d(8)
    twice = replace_batch_norm(nn.Sequential(shared, nn.ReLU(), shared), num_groups=2)
    assert twice[0] is twice[2]


def test_groups_that_do_not_divide_the_channels_are_refused_with_the_layer():
    with pytest.raises(ValueError, match=r"num_groups must divide.*layer 2 has 32, got 5"):
        replace_batch_norm(net(nn.BatchNorm1d(32)), num_groups=5)
    with pytest.raises(ValueError, match="num_groups must be at least 1"):
        replace_batch_norm(net(nn.BatchNorm1d(32)), num_groups=0)
    with pytest.raises(TypeError, match="model must be"):
        replace_batch_norm("net")


def test_squared_errors_of_vectors_are_a_sum():
    targets = torch.randn(16, 10, generator=torch.Generator().manual_seed(0))
    assert find_interactions(dense_net(), (digits()[0], targets), squared_error_sum) == []
