"""A causal language model by Accelerate: texts in blocks, get_scheduler, saved each n steps and resumed, trackers."""

import argparse
import json
import logging
import math
import os
from itertools import chain

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import ProjectConfiguration, set_seed
from torch.nn import functional as F
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import GPT2Config, GPT2LMHeadModel, default_data_collator, get_scheduler

torch.set_default_dtype(torch.float64)
logger = get_logger(__name__)


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description="Train a language model on lines of text")
    parser.add_argument("--per_device_train_batch_size", type=int, default=5)
    parser.add_argument("--per_device_eval_batch_size", type=int, default=4)
    parser.add_argument("--learning_rate", type=float, default=4e-3)
    parser.add_argument("--weight_decay", type=float, default=0.1)
    parser.add_argument("--num_train_epochs", type=int, default=2)
    parser.add_argument("--max_train_steps", type=int, default=None)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--lr_scheduler_type", default="polynomial")
    parser.add_argument("--num_warmup_steps", type=int, default=2)
    parser.add_argument("--block_size", type=int, default=12)
    parser.add_argument("--checkpointing_steps", default="3")
    parser.add_argument("--resume_from_checkpoint", default=None)
    parser.add_argument("--output_dir", default="lm")
    parser.add_argument("--seed", type=int, default=17)
    return parser.parse_args(argv)


def read_lines(seed, count):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        start = int(torch.randint(30, (1,), generator=generator))
        length = int(torch.randint(5, 15, (1,), generator=generator))
        yield {"input_ids": [(start + 7 * i) % 37 for i in range(length)], "attention_mask": [1] * length}


def group_texts(examples, block_size):
    joined = {k: list(chain(*[example[k] for example in examples])) for k in examples[0]}
    total = (len(joined["input_ids"]) // block_size) * block_size
    blocks = [
        {k: values[i : i + block_size] for k, values in joined.items()} for i in range(0, total, block_size)
    ]
    return [block | {"labels": block["input_ids"].copy()} for block in blocks]


def causal_loss(logits, labels):
    """The model's own loss is of float32."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def main(args):
    project = ProjectConfiguration(project_dir=args.output_dir, total_limit=2, automatic_checkpoint_naming=False)
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=args.gradient_accumulation_steps, project_config=project
    )
    logging.basicConfig(level=logging.INFO, format="%(name)s %(message)s")
    logger.info(accelerator.state, main_process_only=False)
    set_seed(args.seed)
    if accelerator.is_main_process:
        os.makedirs(args.output_dir, exist_ok=True)
    accelerator.wait_for_everyone()
    with accelerator.main_process_first():
        train_dataset = group_texts(list(read_lines(1, 45)), args.block_size)
        eval_dataset = group_texts(list(read_lines(2, 15)), args.block_size)
    config = GPT2Config(vocab_size=37, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    train_dataloader = DataLoader(
        train_dataset, shuffle=True, collate_fn=default_data_collator, batch_size=args.per_device_train_batch_size
    )
    eval_dataloader = DataLoader(
        eval_dataset, collate_fn=default_data_collator, batch_size=args.per_device_eval_batch_size
    )
    no_decay = ["bias", "ln_"]
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if not any(d in n for d in no_decay)], "weight_decay": args.weight_decay},
        {"params": [p for n, p in named if any(d in n for d in no_decay)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=args.learning_rate)
    per_epoch = math.ceil(len(train_dataloader) / args.gradient_accumulation_steps)
    if args.max_train_steps is None:
        args.max_train_steps = args.num_train_epochs * per_epoch
    lr_scheduler = get_scheduler(
        name=args.lr_scheduler_type,
        optimizer=optimizer,
        num_warmup_steps=args.num_warmup_steps * accelerator.num_processes,
        num_training_steps=args.max_train_steps * accelerator.num_processes,
    )
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    total = args.per_device_train_batch_size * accelerator.num_processes * args.gradient_accumulation_steps
    accelerator.print(f"{len(train_dataset)} blocks, {per_epoch} updates an epoch, total batch {total}")
    completed, starting_epoch, resume_step = 0, 0, None
    if args.resume_from_checkpoint:
        accelerator.load_state(args.resume_from_checkpoint)
        at = int(os.path.basename(args.resume_from_checkpoint).replace("step_", ""))
        resume_step = at * args.gradient_accumulation_steps
        starting_epoch = resume_step // len(train_dataloader)
        completed = at
        resume_step -= starting_epoch * len(train_dataloader)
        accelerator.print(f"resumed epoch {starting_epoch} batch {resume_step}")
    progress_bar = tqdm(range(args.max_train_steps), disable=not accelerator.is_local_main_process)
    progress_bar.update(completed)
    for epoch in range(starting_epoch, args.num_train_epochs):
        model.train()
        total_loss = 0
        active = train_dataloader
        if epoch == starting_epoch and resume_step:
            active = accelerator.skip_first_batches(train_dataloader, resume_step)
        for batch in active:
            with accelerator.accumulate(model):
                outputs = model(**batch)
                loss = causal_loss(outputs.logits, batch["labels"])
                total_loss += loss.detach()
                accelerator.backward(loss)
                norm = accelerator.clip_grad_norm_(model.parameters(), 0.5) if accelerator.sync_gradients else None
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                progress_bar.update(1)
                progress_bar.set_postfix(loss=loss.item())
                completed += 1
                rate = lr_scheduler.get_last_lr()[0]
                accelerator.print(f"step {completed} loss {loss.item():.10g} norm {norm:.10g} rate {rate:.10g}")
                if completed % int(args.checkpointing_steps) == 0:
                    accelerator.save_state(os.path.join(args.output_dir, f"step_{completed}"))
            if completed >= args.max_train_steps:
                break
        model.eval()
        losses = []
        for batch in eval_dataloader:
            with torch.no_grad():
                outputs = model(**batch)
            loss = causal_loss(outputs.logits, batch["labels"])
            losses.append(accelerator.gather_for_metrics(loss.repeat(args.per_device_eval_batch_size)))
        losses = torch.cat(losses)
        try:
            eval_loss = torch.mean(losses)
            perplexity = math.exp(eval_loss)
        except OverflowError:
            perplexity = float("inf")
        accelerator.print(f"epoch {epoch}: perplexity {perplexity:.10g} eval {eval_loss:.10g} of {len(losses)}, total {total_loss:.10g}")
    accelerator.wait_for_everyone()
    unwrapped = accelerator.unwrap_model(model)
    unwrapped.save_pretrained(
        args.output_dir, is_main_process=accelerator.is_main_process, save_function=accelerator.save
    )
    if accelerator.is_main_process:
        with open(os.path.join(args.output_dir, "all_results.json"), "w") as file:
            json.dump({"perplexity": perplexity}, file)
    accelerator.end_training()
    return unwrapped


if __name__ == "__main__":
    first = main(parse_args([]))
    steps = sorted(name for name in os.listdir("lm") if name.startswith("step_"))
    print(steps, sorted(os.listdir("lm/step_3")))
    second = main(parse_args(["--resume_from_checkpoint", os.path.join("lm", steps[1])]))
    loaded = GPT2LMHeadModel.from_pretrained("lm").double()
    norms = [sum(p.norm() for p in m.parameters()).item() for m in (first, second, loaded)]
    print("norms", " ".join(f"{norm:.10g}" for norm in norms), json.load(open("lm/all_results.json")))
