"""A GAN in its usual form: two networks, two optimizers, labels by torch.full, noise, a detached fake."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(1)
torch.set_default_dtype(torch.float64)


class Images(Dataset):
    def __init__(self):
        self.images = torch.randn(13, 1, 8, 8).tanh()

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return self.images[i] + 0.01 * torch.randn(1, 8, 8)


nz = 5
generator = nn.Sequential(
    nn.ConvTranspose2d(nz, 8, 4, 1, 0, bias=False), nn.BatchNorm2d(8), nn.ReLU(True),
    nn.ConvTranspose2d(8, 1, 4, 2, 1, bias=False), nn.Tanh(),
)  # fmt: skip
discriminator = nn.Sequential(
    nn.Conv2d(1, 8, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True),
    nn.Conv2d(8, 1, 4, 1, 0, bias=False), nn.Sigmoid(),
)  # fmt: skip
criterion = nn.BCELoss()
fixed = torch.randn(6, nz, 1, 1)
opt_d = torch.optim.Adam(discriminator.parameters(), lr=0.002, betas=(0.5, 0.999))
opt_g = torch.optim.Adam(generator.parameters(), lr=0.002, betas=(0.5, 0.999))

for epoch in range(2):
    for i, real in enumerate(DataLoader(Images(), batch_size=5, shuffle=True)):
        discriminator.zero_grad()
        size = real.size(0)
        label = torch.full((size,), 1.0)
        error_real = criterion(discriminator(real).view(-1), label)
        error_real.backward()
        fake = generator(torch.randn(size, nz, 1, 1))
        label.fill_(0.0)
        output = discriminator(fake.detach()).view(-1)
        error_fake = criterion(output, label)
        error_fake.backward()
        opt_d.step()
        generator.zero_grad()
        label.fill_(1.0)
        output = discriminator(fake).view(-1)
        error_g = criterion(output, label)
        error_g.backward()
        opt_g.step()
        print(f"{epoch} {i}: {(error_real + error_fake).item():.9f} {error_g.item():.9f} {output.mean():.9f}")
    with torch.no_grad():
        print(f"images {generator(fixed).detach().cpu().abs().mean():.9f}")
