"""Summaries by T5 and Accelerate: labels padded with -100, beams in evaluation, padding across processes, ROUGE."""

import collections

import numpy as np
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, Dataset
from transformers import T5Config, T5ForConditionalGeneration, get_linear_schedule_with_warmup, set_seed

torch.set_default_dtype(torch.float64)
PAD, EOS = 0, 1


class Articles(Dataset):
    """Articles, of which the summary is each third word."""

    def __init__(self, count, seed):
        rng = np.random.default_rng(seed)
        self.rows = [rng.integers(3, 28, size=rng.integers(4, 14)).tolist() for _ in range(count)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        words = self.rows[index]
        return {"input_ids": [*words, EOS], "labels": [*words[::3], EOS]}


class DataCollatorForSummaries:
    def __init__(self, model, pad_to_multiple_of=None):
        self.model, self.multiple = model, pad_to_multiple_of

    def pad(self, rows, value):
        longest = max(map(len, rows))
        if self.multiple:
            longest = -(-longest // self.multiple) * self.multiple
        return torch.tensor([row + [value] * (longest - len(row)) for row in rows])

    def __call__(self, features):
        ids = self.pad([f["input_ids"] for f in features], PAD)
        labels = self.pad([f["labels"] for f in features], -100)
        return {
            "input_ids": ids,
            "attention_mask": (ids != PAD).long(),
            "labels": labels,
            "decoder_input_ids": self.model.prepare_decoder_input_ids_from_labels(labels=labels),
        }


def rouge(predictions, references):
    """F1 of words in common, and of the longest common subsequence."""
    scores = []
    for guess, truth in zip(predictions, references):
        common = sum((collections.Counter(guess) & collections.Counter(truth)).values())
        table = np.zeros((len(guess) + 1, len(truth) + 1), dtype=int)
        for i, a in enumerate(guess):
            for j, b in enumerate(truth):
                table[i + 1, j + 1] = table[i, j] + 1 if a == b else max(table[i, j + 1], table[i + 1, j])
        scores.append([2 * n / max(len(guess) + len(truth), 1) for n in (common, table[-1, -1])])
    return np.mean(scores, axis=0)


def postprocess(rows):
    return [[int(word) for word in row if word > EOS] for row in rows]


def main():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    set_seed(5)
    config = T5Config(
        vocab_size=28, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, dropout_rate=0.1,
        feed_forward_proj="gated-gelu", decoder_start_token_id=PAD, tie_word_embeddings=False,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config)
    collator = DataCollatorForSummaries(model, pad_to_multiple_of=4)
    train_loader = DataLoader(Articles(38, 0), shuffle=True, collate_fn=collator, batch_size=5)
    eval_loader = DataLoader(Articles(13, 1), collate_fn=collator, batch_size=4)
    decay = [p for n, p in model.named_parameters() if "layer_norm" not in n]
    rest = [p for n, p in model.named_parameters() if "layer_norm" in n]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}], lr=8e-3
    )
    scheduler = get_linear_schedule_with_warmup(optimizer, 2, 16)
    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, scheduler
    )
    accelerator.register_for_checkpointing(scheduler)
    for epoch in range(2):
        model.train()
        for step, batch in enumerate(train_loader):
            with accelerator.accumulate(model):
                outputs = model(**batch)
                accelerator.backward(outputs.loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    print(f"epoch {epoch} step {step} loss {outputs.loss.item():.10g} norm {norm.item():.10g}")
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        model.eval()
        gen_kwargs = {"max_length": 8, "num_beams": 2 if epoch else 1, "length_penalty": 0.8}
        guesses, truths, tokens = [], [], 0
        for batch in eval_loader:
            with torch.no_grad():
                generated = accelerator.unwrap_model(model).generate(
                    batch["input_ids"], attention_mask=batch["attention_mask"], **gen_kwargs
                )
                generated = accelerator.pad_across_processes(generated, dim=1, pad_index=PAD)
                labels = accelerator.pad_across_processes(batch["labels"], dim=1, pad_index=PAD)
                generated, labels = accelerator.gather_for_metrics((generated, labels))
                generated, labels = generated.cpu().numpy(), labels.cpu().numpy()
                labels = np.where(labels != -100, labels, PAD)
                if isinstance(generated, tuple):
                    generated = generated[0]
                guesses += postprocess(generated)
                truths += postprocess(labels)
                tokens += generated.size
        one, longest = rouge(guesses, truths)
        print(f"epoch {epoch} rouge1 {one:.10g} rougeL {longest:.10g} tokens {tokens} of {len(guesses)}: {guesses[0]}")
    accelerator.save_state("summaries")
    accelerator.save_model(model, "final", safe_serialization=False)
    print(f"norms {sum(p.norm() for p in accelerator.unwrap_model(model).parameters()).item():.10g}")
    with torch.no_grad():
        next(model.parameters()).zero_()
    accelerator.load_state("summaries")
    print(f"norms {sum(p.norm() for p in model.parameters()).item():.10g}")


if __name__ == "__main__":
    main()
