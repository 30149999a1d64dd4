"""A categorical autoencoder: Gumbel-softmax, straight through, its temperature annealed by NumPy."""

import argparse

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

torch.set_default_dtype(torch.float64)
parser = argparse.ArgumentParser(description="categorical VAE")
parser.add_argument("--batch-size", type=int, default=14)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--temp", type=float, default=1.0)
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--hard", action="store_true", default=False)
args = parser.parse_args()
torch.manual_seed(args.seed)
np.random.seed(args.seed)
LATENT, CATEGORIES = 5, 4


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(36, 24), nn.Linear(24, LATENT * CATEGORIES)
        self.fc3, self.fc4 = nn.Linear(LATENT * CATEGORIES, 24), nn.Linear(24, 36)

    def forward(self, x, temp, hard):
        q = self.fc2(F.relu(self.fc1(x.view(-1, 36))))
        q_y = q.view(q.size(0), LATENT, CATEGORIES)
        z = gumbel_softmax(q_y, temp, hard)
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), F.softmax(q_y, dim=-1).reshape(*q.size())


def sample_gumbel(shape, eps=1e-20):
    u = torch.rand(shape)
    return -torch.log(-torch.log(u + eps) + eps)


def gumbel_softmax(logits, temperature, hard=False):
    y = F.softmax((logits + sample_gumbel(logits.size())) / temperature, dim=-1)
    if not hard:
        return y.view(-1, LATENT * CATEGORIES)
    shape = y.size()
    _, ind = y.max(dim=-1)
    y_hard = torch.zeros_like(y).view(-1, shape[-1])
    y_hard.scatter_(1, ind.view(-1, 1), 1)
    y_hard = y_hard.view(*shape)
    y_hard = (y_hard - y).detach() + y
    return y_hard.view(-1, LATENT * CATEGORIES)


def loss_function(recon_x, x, qy):
    bce = F.binary_cross_entropy(recon_x, x.view(-1, 36), reduction="sum") / x.shape[0]
    log_ratio = torch.log(qy * CATEGORIES + 1e-20)
    kld = torch.sum(qy * log_ratio, dim=-1).mean()
    return bce + kld, bce, kld


data = (torch.rand(61, 1, 6, 6) < torch.rand(61, 1, 1, 1)).double()
train_loader = DataLoader(TensorDataset(data[:45]), args.batch_size, shuffle=True)
test_loader = DataLoader(TensorDataset(data[45:]), args.batch_size)
model = VAE()
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.5)
temp, step = args.temp, 0
for epoch in range(1, args.epochs + 1):
    model.train()
    bar = tqdm(train_loader, desc=f"epoch {epoch}", leave=False)
    for (x,) in bar:
        optimizer.zero_grad()
        recon, qy = model(x, temp, args.hard or epoch == 2)
        loss, bce, kld = loss_function(recon, x, qy)
        loss.backward()
        optimizer.step()
        if step % 3 == 1:
            temp = np.maximum(temp * np.exp(-0.03 * step), 0.5)
        step += 1
        bar.set_postfix(loss=loss.item(), temp=float(temp))
    print(
        f"epoch {epoch} loss {loss.item():.10g} bce {bce.item():.10g} kld {kld.item():.10g} temp {temp:.10g}"
    )
    model.eval()
    test_loss, usage = 0.0, torch.zeros(CATEGORIES)
    with torch.no_grad():
        for i, (x,) in enumerate(test_loader):
            recon, qy = model(x, temp, True)
            test_loss += loss_function(recon, x, qy)[0].item() * len(x)
            usage += F.one_hot(qy.view(-1, LATENT, CATEGORIES).argmax(-1), CATEGORIES).sum((0, 1))
            if i == 0:
                both = torch.cat([x[:4], recon.view(-1, 1, 6, 6)[:4]])
                print(f"  pictures {both.mean().item():.10g} {both.std().item():.10g}")
    print(f"  test {test_loss / len(test_loader.dataset):.10g} usage {usage.tolist()}")
    m = 6 * LATENT
    noise = np.zeros((m, CATEGORIES))
    noise[range(m), np.random.choice(CATEGORIES, m)] = 1
    sample = torch.from_numpy(noise.reshape(6, LATENT * CATEGORIES))
    with torch.no_grad():
        sample = torch.sigmoid(model.fc4(F.relu(model.fc3(sample)))).cpu()
    print(f"  samples {sample.sum().item():.10g}")
