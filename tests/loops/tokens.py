"""Updates for sequences with ignored labels (-100), right and wrong."""

from torch.nn.functional import cross_entropy

from course_lib.accumulation import update_parameters
from course_lib.losses import count_tokens, token_cross_entropy_sum

RIGHT, WRONG = {}, {}


def right(function):
    RIGHT[function.__name__] = function
    return function


def fault(*codes):
    def note(function):
        WRONG[function.__name__] = (function, codes)
        return function

    return note


def loss_of(model, micro_batch, reduction):
    inputs, targets = micro_batch
    return cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction=reduction)


def tokens_of(micro_batch):
    return int((micro_batch[1] != -100).sum())


def with_weights(model, optimizer, micro_batches, weight, reduction="mean"):
    """Make an update in which each micro-batch's loss has a weight, and return the sum."""
    optimizer.zero_grad()
    reported = 0.0
    for micro_batch in micro_batches:
        loss = loss_of(model, micro_batch, reduction) * weight(micro_batch)
        loss.backward()
        reported += loss.item()
    optimizer.step()
    return reported


@right
def the_course_itself(model, optimizer, micro_batches):
    return update_parameters(model, optimizer, micro_batches, token_cross_entropy_sum, count_tokens)


@right
def sums_over_tokens(model, optimizer, micro_batches):
    total = sum(map(tokens_of, micro_batches))
    return with_weights(model, optimizer, micro_batches, lambda batch: 1 / total, reduction="sum")


@right
def means_weighted_by_tokens(model, optimizer, micro_batches):
    total = sum(map(tokens_of, micro_batches))
    return with_weights(model, optimizer, micro_batches, lambda batch: tokens_of(batch) / total)


@fault("mean-of-means")
def mean_of_means(model, optimizer, micro_batches):
    return with_weights(model, optimizer, micro_batches, lambda batch: 1 / len(micro_batches))


@fault("mean-of-means")
def weighted_by_sequences(model, optimizer, micro_batches):
    total = sum(len(targets) for _, targets in micro_batches)
    return with_weights(model, optimizer, micro_batches, lambda batch: len(batch[1]) / total)


@fault("mean-of-means")
def mean_over_each_sequence(model, optimizer, micro_batches):
    optimizer.zero_grad()
    total = sum(len(targets) for _, targets in micro_batches)
    for inputs, targets in micro_batches:
        for row in range(len(targets)):
            (loss_of(model, (inputs[row : row + 1], targets[row : row + 1]), "mean") / total).backward()
    optimizer.step()


@fault("not-divided")
def means_without_division(model, optimizer, micro_batches):
    return with_weights(model, optimizer, micro_batches, lambda batch: 1)


@fault("divided-twice")
def by_tokens_and_micro_batches(model, optimizer, micro_batches):
    total = sum(map(tokens_of, micro_batches)) * len(micro_batches)
    return with_weights(model, optimizer, micro_batches, lambda batch: 1 / total, reduction="sum")


@fault("wrong-scale")
def ignored_labels_counted(model, optimizer, micro_batches):
    total = sum(targets.numel() for _, targets in micro_batches)
    return with_weights(model, optimizer, micro_batches, lambda batch: 1 / total, reduction="sum")


@fault("samples-dropped")
def without_the_last(model, optimizer, micro_batches):
    return sums_over_tokens(model, optimizer, micro_batches[:-1] or micro_batches)
