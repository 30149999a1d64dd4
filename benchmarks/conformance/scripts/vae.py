"""A variational autoencoder of digits, with samples and reconstructions after each epoch."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)
torch.manual_seed(1)

images = torch.tensor(load_digits().images[:201] / 16)
train_loader = DataLoader(TensorDataset(images[:129], torch.zeros(129)), batch_size=16, shuffle=True)
test_loader = DataLoader(TensorDataset(images[129:], torch.zeros(72)), batch_size=32)


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(64, 40)
        self.fc21 = nn.Linear(40, 5)
        self.fc22 = nn.Linear(40, 5)
        self.fc3 = nn.Linear(5, 40)
        self.fc4 = nn.Linear(40, 64)

    def encode(self, x):
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        eps = torch.randn_like(std)
        return mu + eps * std

    def decode(self, z):
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x):
        mu, logvar = self.encode(x.view(-1, 64))
        return self.decode(self.reparameterize(mu, logvar)), mu, logvar


model = VAE()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)


def loss_function(recon_x, x, mu, logvar):
    bce = F.binary_cross_entropy(recon_x, x.view(-1, 64), reduction="sum")
    kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return bce + kld


def train(epoch):
    model.train()
    train_loss = 0
    for batch_idx, (data, _) in enumerate(train_loader):
        optimizer.zero_grad()
        recon_batch, mu, logvar = model(data)
        loss = loss_function(recon_batch, data, mu, logvar)
        loss.backward()
        train_loss += loss.item()
        optimizer.step()
        if batch_idx % 3 == 0:
            print(f"Train {epoch} [{batch_idx * len(data)}] Loss: {loss.item() / len(data):.10g}")
    print(f"====> Epoch: {epoch} Average loss: {train_loss / len(train_loader.dataset):.10g}")


def test(epoch):
    model.eval()
    test_loss = 0
    with torch.no_grad():
        for i, (data, _) in enumerate(test_loader):
            recon_batch, mu, logvar = model(data)
            test_loss += loss_function(recon_batch, data, mu, logvar).item()
            if i == 0:
                n = min(data.size(0), 8)
                comparison = torch.cat([data[:n].unsqueeze(1), recon_batch.view(-1, 1, 8, 8)[:n]])
                torch.save(comparison.cpu(), f"reconstruction_{epoch}.pt")
                print(f"comparison {tuple(comparison.shape)} {comparison.mean().item():.10g}")
    print(f"====> Test set loss: {test_loss / len(test_loader.dataset):.10g}")


for epoch in range(1, 4):
    train(epoch)
    test(epoch)
    with torch.no_grad():
        sample = model.decode(torch.randn(16, 5)).cpu()
        print(f"sample {sample.view(16, 1, 8, 8).mean().item():.10g}")
print(f"norms {sum(p.norm() for p in model.parameters()):.10g}")
