"""LoRA by parametrizations over a frozen transformer, merged, then pruned and fine-tuned."""

import torch
from torch import nn
from torch.nn.utils import parametrize, prune
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)
torch.manual_seed(8)


class LoRA(nn.Module):
    def __init__(self, out_features, in_features, rank=2, alpha=4):
        super().__init__()
        self.a = nn.Parameter(torch.randn(rank, in_features) / rank)
        self.b = nn.Parameter(torch.zeros(out_features, rank))
        self.scale, self.enabled = alpha / rank, True

    def forward(self, weight):
        return weight + (self.b @ self.a).view(weight.shape) * self.scale if self.enabled else weight


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(13, 12, padding_idx=0)
        layer = nn.TransformerEncoderLayer(12, 3, 20, dropout=0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(12, 2)

    def forward(self, tokens):
        padded = tokens == 0
        h = self.encoder(self.embed(tokens), src_key_padding_mask=padded)
        h = h.masked_fill(padded.unsqueeze(-1), 0).sum(1) / (~padded).sum(1, keepdim=True)
        return self.out(h)


tokens = torch.randint(1, 13, (66, 7))
lengths = torch.randint(3, 8, (66,))
tokens[torch.arange(7)[None, :] >= lengths[:, None]] = 0
labels = ((tokens == 5).sum(1) > (tokens == 6).sum(1)).long()
loader = DataLoader(TensorDataset(tokens, labels), batch_size=10, shuffle=True)
model = Classifier()


def train(name, epochs, lr):
    trainable = [p for p in model.parameters() if p.requires_grad]
    print(
        f"{name}: {sum(p.numel() for p in trainable)} of {sum(p.numel() for p in model.parameters())} parameters"
    )
    optimizer = torch.optim.AdamW(trainable, lr=lr)
    for epoch in range(epochs):
        model.train()
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            grads = {n: p.grad.norm().item() for n, p in model.named_parameters() if p.grad is not None}
            optimizer.step()
        print(f"{name} {epoch} loss {loss.item():.10g} gradients {len(grads)} {max(grads.values()):.10g}")


def evaluate():
    model.eval()
    with torch.no_grad():
        logits = torch.cat([model(x) for x, _ in DataLoader(loader.dataset, 16)])
    return f"{nn.functional.cross_entropy(logits, labels).item():.10g} {(logits.argmax(1) == labels).sum().item()}"


train("pretraining", 2, 3e-3)
model.requires_grad_(False)
for module in list(model.encoder.modules()):
    if isinstance(module, nn.Linear) and not isinstance(
        module, nn.modules.linear.NonDynamicallyQuantizableLinear
    ):
        parametrize.register_parametrization(module, "weight", LoRA(*module.weight.shape))
model.out.requires_grad_(True)
for name, p in model.named_parameters():
    if name.endswith((".a", ".b")):
        p.requires_grad = True
train("adapters", 2, 1e-2)
adapters = {n: p.detach().clone() for n, p in model.named_parameters() if n.endswith((".0.a", ".0.b"))}
torch.save(adapters, "adapters.pt")
print("with", evaluate())
for module in model.modules():
    if isinstance(module, LoRA):
        module.enabled = False
print("without", evaluate())
for module in model.modules():
    if isinstance(module, LoRA):
        module.enabled = True
with parametrize.cached():
    print("cached", evaluate())
for module in list(model.modules()):
    if parametrize.is_parametrized(module, "weight"):
        parametrize.remove_parametrizations(module, "weight", leave_parametrized=True)
print("merged", evaluate(), len(torch.load("adapters.pt", weights_only=True)))
pruned = [(m, "weight") for m in model.modules() if type(m) is nn.Linear]
prune.global_unstructured(pruned, pruning_method=prune.L1Unstructured, amount=0.4)
prune.ln_structured(model.out, name="weight", amount=0.25, n=2, dim=1)
model.requires_grad_(True)
train("pruned", 2, 2e-3)
zeros = sum((m.weight == 0).sum().item() for m, _ in pruned)
print(f"zeros {zeros} of {sum(m.weight.nelement() for m, _ in pruned)}", evaluate())
for module, name in pruned:
    prune.remove(module, name)
print("final", evaluate(), f"{sum(p.norm() for p in model.parameters()):.10g}")
