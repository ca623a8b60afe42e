"""What the notebooks say of other tools, run with those tools: the tail of an epoch under 4 accumulation steps.

The gradient of the loss is 1 for every sample, so `.grad` before a step tells what the group was divided by. The 1797
digits in micro-batches of 16 are 113: 28 groups of 4 and a tail of 1 in each epoch.
"""

import logging
import warnings
from collections import Counter

import torch
from torch.utils.data import DataLoader, TensorDataset

NUM_SAMPLES, MICRO_BATCH_SIZE, STEPS, EPOCHS = 1797, 16, 4, 2
DIVIDED_BY_K = Counter({1.0: 56, 0.25: 2})  # the tail, one micro-batch, is divided by the full 4
DIVIDED_BY_ITS_SIZE = Counter({1.0: 58})


class Ruler(torch.nn.Module):
    """A model whose mean loss has gradient 1, for any batch."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def forward(self, x=None, labels=None):
        return {"loss": (self.weight * torch.ones(len(x))).mean()}


def loader():
    return DataLoader(TensorDataset(torch.ones(NUM_SAMPLES, 1)), batch_size=MICRO_BATCH_SIZE)


def test_accelerate_divides_the_tail_by_the_full_k():
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=STEPS)
    model = Ruler()
    model, optimizer, batches = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), loader())
    seen = Counter()
    for _ in range(EPOCHS):
        for (inputs,) in batches:
            with accelerator.accumulate(model):
                accelerator.backward(model(inputs)["loss"])
                if accelerator.sync_gradients:
                    seen[round(model.weight.grad.item(), 4)] += 1
                optimizer.step()
                optimizer.zero_grad()
    assert seen == DIVIDED_BY_K


def test_lightning_divides_the_tail_by_the_full_k():
    import lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    seen = Counter()

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.ruler = Ruler()

        def training_step(self, batch, index):
            return self.ruler(batch[0])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.0)

        def on_before_optimizer_step(self, optimizer):
            seen[round(self.ruler.weight.grad.item(), 4)] += 1

    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # advice on workers and logging
        trainer = lightning.Trainer(
            accelerator="cpu", max_epochs=EPOCHS, accumulate_grad_batches=STEPS, barebones=False, **quiet
        )
        trainer.fit(Module(), loader())
    assert seen == DIVIDED_BY_K
    assert trainer.global_step == seen.total()


def test_transformers_divides_the_tail_by_its_own_size(tmp_path):
    from transformers import Trainer, TrainerCallback, TrainingArguments

    seen = Counter()

    class Watch(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            seen[round(model.weight.grad.item(), 4)] += 1

    samples = [{"x": torch.ones(1), "labels": torch.ones(1)} for _ in range(NUM_SAMPLES)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=MICRO_BATCH_SIZE,
        gradient_accumulation_steps=STEPS,
        num_train_epochs=EPOCHS,
        max_grad_norm=0.0,
        learning_rate=0.0,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    trainer = Trainer(Ruler(), arguments, train_dataset=samples, callbacks=[Watch()])
    trainer.train()
    assert seen == DIVIDED_BY_ITS_SIZE
    assert trainer.state.global_step == seen.total()
