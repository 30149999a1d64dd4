"""Super-resolution by sub-pixel convolution: PSNR of a test set, the model saved and loaded."""

import argparse
from math import log10

import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.nn import init
from torch.utils.data import DataLoader, Dataset

torch.set_default_dtype(torch.float64)


class Net(nn.Module):
    def __init__(self, upscale_factor):
        super().__init__()
        self.relu = nn.ReLU()
        self.conv1 = nn.Conv2d(1, 8, (5, 5), (1, 1), (2, 2))
        self.conv2 = nn.Conv2d(8, 6, (3, 3), (1, 1), (1, 1))
        self.conv3 = nn.Conv2d(6, upscale_factor**2, (3, 3), (1, 1), (1, 1))
        self.pixel_shuffle = nn.PixelShuffle(upscale_factor)
        init.orthogonal_(self.conv1.weight, init.calculate_gain("relu"))
        init.orthogonal_(self.conv2.weight, init.calculate_gain("relu"))
        init.orthogonal_(self.conv3.weight)

    def forward(self, x):
        x = self.relu(self.conv1(x))
        x = self.relu(self.conv2(x))
        return self.pixel_shuffle(self.conv3(x))


class Waves(Dataset):
    """Pictures of waves, small and large."""

    def __init__(self, size, factor):
        generator = torch.Generator().manual_seed(size)
        grid = torch.linspace(0, 3, 12)
        freq = torch.rand(size, 2, 1, generator=generator) * 3
        self.large = (
            torch.sin(freq[:, 0] * grid)[:, None, :, None] * torch.cos(freq[:, 1] * grid)[:, None, None]
        )
        self.small = F.avg_pool2d(self.large, factor)

    def __len__(self):
        return len(self.large)

    def __getitem__(self, index):
        return self.small[index], self.large[index]


parser = argparse.ArgumentParser(description="Super resolution")
parser.add_argument("--upscale_factor", type=int, default=3)
parser.add_argument("--batchSize", type=int, default=8)
parser.add_argument("--nEpochs", type=int, default=2)
opt = parser.parse_args()
torch.manual_seed(123)
training_data_loader = DataLoader(Waves(33, opt.upscale_factor), batch_size=opt.batchSize, shuffle=True)
testing_data_loader = DataLoader(Waves(13, opt.upscale_factor), batch_size=5, shuffle=False)
model = Net(upscale_factor=opt.upscale_factor)
criterion = nn.MSELoss()
optimizer = optim.Adam(model.parameters(), lr=0.003)


def train(epoch):
    epoch_loss = 0
    for iteration, batch in enumerate(training_data_loader, 1):
        input, target = batch[0], batch[1]
        optimizer.zero_grad()
        loss = criterion(model(input), target)
        epoch_loss += loss.item()
        loss.backward()
        optimizer.step()
        print(f"===> Epoch[{epoch}]({iteration}/{len(training_data_loader)}): Loss: {loss.item():.10g}")
    print(f"===> Epoch {epoch} Complete: Avg. Loss: {epoch_loss / len(training_data_loader):.10g}")


def test():
    avg_psnr = 0
    with torch.no_grad():
        for batch in testing_data_loader:
            input, target = batch[0], batch[1]
            mse = criterion(model(input), target)
            avg_psnr += 10 * log10(1 / mse.item())
    print(f"===> Avg. PSNR: {avg_psnr / len(testing_data_loader):.10g} dB")


for epoch in range(1, opt.nEpochs + 1):
    train(epoch)
    test()
    torch.save(model, f"model_epoch_{epoch}.pth")
loaded = torch.load(f"model_epoch_{opt.nEpochs}.pth", weights_only=False)
picture = Waves(2, opt.upscale_factor)[1][0].view(1, -1, 4, 4)
out = loaded(picture)[0].detach().numpy().clip(-1, 1)
print(f"picture {out.shape} {out.mean():.10g}")
print(f"norms {sum(p.norm() for p in loaded.parameters()):.10g}")
