"""A subclass of Trainer: weighted loss, sampler, optimizer groups, early stopping, best model, batches by length."""

import sys

import numpy as np
import torch
from sklearn.metrics import classification_report, matthews_corrcoef, roc_auc_score
from torch import nn
from torch.utils.data import Dataset, WeightedRandomSampler
from transformers import (
    DistilBertConfig,
    DistilBertForSequenceClassification,
    EarlyStoppingCallback,
    HfArgumentParser,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_callback import PrinterCallback

torch.set_default_dtype(torch.float64)


class Reviews(Dataset):
    def __init__(self, count, seed):
        rng = np.random.default_rng(seed)
        self.labels = (rng.random(count) < 0.25).astype(int)
        self.texts = [
            rng.integers(4 + 8 * label, 30, size=rng.integers(3, 11)).tolist() for label in self.labels
        ]

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, idx):
        return {"input_ids": self.texts[idx], "label": int(self.labels[idx]), "length": len(self.texts[idx])}


def collate(batch):
    longest = max(row["length"] for row in batch)
    ids = torch.zeros(len(batch), longest, dtype=torch.long)
    for i, row in enumerate(batch):
        ids[i, : row["length"]] = torch.tensor(row["input_ids"])
    return {"input_ids": ids, "attention_mask": ids.ne(0).long(), "labels": torch.tensor([r["label"] for r in batch])}


class WeightedTrainer(Trainer):
    def __init__(self, *args, class_weights=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.class_weights = class_weights

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits = outputs.get("logits")
        loss = nn.CrossEntropyLoss(weight=self.class_weights)(logits.view(-1, 2), labels.view(-1))
        confidence = torch.softmax(logits, -1).max(-1).values
        loss = loss + 0.1 * (confidence - 0.8).clamp(min=0).pow(2).mean()
        return (loss, {"logits": logits, "hidden": confidence}) if return_outputs else loss

    def create_optimizer(self, model=None):
        if self.optimizer is None:
            head = [p for n, p in self.model.named_parameters() if "classifier" in n]
            body = [p for n, p in self.model.named_parameters() if "classifier" not in n and p.requires_grad]
            self.optimizer = torch.optim.AdamW(
                [{"params": body, "lr": self.args.learning_rate}, {"params": head, "lr": 5 * self.args.learning_rate}]
            )
        return self.optimizer


class SampledTrainer(WeightedTrainer):
    def _get_train_sampler(self, *args, **kwargs):
        weights = np.where(self.train_dataset.labels == 1, 3.0, 1.0)
        return WeightedRandomSampler(weights.tolist(), len(weights), generator=torch.Generator().manual_seed(3))


class Recorder(TrainerCallback):
    """Prints logs, and thaws a layer midway."""

    def on_epoch_begin(self, args, state, control, model=None, **kwargs):
        for p in model.distilbert.embeddings.parameters():
            p.requires_grad = state.epoch is not None and state.epoch >= 1

    def on_log(self, args, state, control, logs=None, **kwargs):
        shown = {k: v for k, v in logs.items() if not k.endswith(("runtime", "per_second", "total_flos"))}
        print(state.global_step, " ".join(f"{k} {v:.10g}" for k, v in shown.items()))

    def on_save(self, args, state, control, **kwargs):
        print(f"saved at {state.global_step}, best {state.best_metric:.10g}")


def preprocess_logits_for_metrics(logits, labels):
    return torch.softmax(logits[0] if isinstance(logits, tuple) else logits, dim=-1)[:, 1]


def compute_metrics(eval_pred):
    scores, labels = eval_pred
    guesses = (scores > 0.5).astype(int)
    report = classification_report(labels, guesses, output_dict=True, zero_division=0)
    return {
        "f1": report["macro avg"]["f1-score"],
        "mcc": matthews_corrcoef(labels, guesses),
        "auc": roc_auc_score(labels, scores),
    }


def main(argv):
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(argv)
    set_seed(args.seed)
    train, test = Reviews(58, 0), Reviews(27, 1)
    weights = torch.tensor(len(train) / (2.0 * np.bincount(train.labels)))
    cls = SampledTrainer if "sampled" in args.output_dir else WeightedTrainer
    config = DistilBertConfig(vocab_size=30, dim=12, hidden_dim=20, n_layers=2, n_heads=2, max_position_embeddings=16)
    trainer = cls(
        model_init=lambda: DistilBertForSequenceClassification(config),
        args=args,
        train_dataset=train,
        eval_dataset={"test": test, "train": torch.utils.data.Subset(train, range(11))},
        data_collator=collate,
        compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        callbacks=[Recorder(), EarlyStoppingCallback(early_stopping_patience=2)],
        class_weights=weights,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    found = trainer.predict(test, metric_key_prefix="final")
    print(" ".join(f"{k} {v:.10g}" for k, v in sorted(found.metrics.items()) if "per_second" not in k and "runtime" not in k))
    trainer.save_model()
    trainer.save_state()
    trainer.log_metrics("final", {"samples": len(test)})
    loaded = DistilBertForSequenceClassification.from_pretrained(args.output_dir).double()
    print("norms", f"{sum(p.norm() for p in loaded.parameters()):.10g} {trainer.state.best_metric:.10g}")


COMMON = """
--use_cpu --report_to none --disable_tqdm True --per_device_train_batch_size 7 --per_device_eval_batch_size 8
--num_train_epochs 3 --learning_rate 2e-3 --warmup_steps 3 --logging_steps 3 --eval_strategy steps --eval_steps 5
--save_strategy steps --save_steps 5 --save_total_limit 2 --load_best_model_at_end
--metric_for_best_model eval_test_auc --greater_is_better True --max_grad_norm 0.7
--remove_unused_columns False --seed 11
"""
if __name__ == "__main__":
    extra = ["--train_sampling_strategy", "group_by_length", "--length_column_name", "length"]
    if not hasattr(TrainingArguments, "train_sampling_strategy"):
        extra = ["--group_by_length", "--length_column_name", "length"]
    main([*COMMON.split(), "--output_dir", "grouped", *extra, "--lr_scheduler_type", "inverse_sqrt"])
    main([*COMMON.split(), "--output_dir", "sampled", "--gradient_accumulation_steps", "2", *sys.argv[1:]])
