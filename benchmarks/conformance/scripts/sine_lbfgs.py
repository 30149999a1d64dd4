"""Continuing sine waves with LSTM cells, trained on all waves at once by LBFGS."""

import numpy as np
import torch
from torch import nn, optim

torch.set_default_dtype(torch.float64)


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm1 = nn.LSTMCell(1, 6)
        self.lstm2 = nn.LSTMCell(6, 6)
        self.linear = nn.Linear(6, 1)

    def forward(self, input, future=0):
        outputs = []
        h_t = torch.zeros(input.size(0), 6, dtype=torch.double)
        c_t = torch.zeros(input.size(0), 6, dtype=torch.double)
        h_t2 = torch.zeros(input.size(0), 6, dtype=torch.double)
        c_t2 = torch.zeros(input.size(0), 6, dtype=torch.double)
        for input_t in input.split(1, dim=1):
            h_t, c_t = self.lstm1(input_t, (h_t, c_t))
            h_t2, c_t2 = self.lstm2(h_t, (h_t2, c_t2))
            output = self.linear(h_t2)
            outputs += [output]
        for _ in range(future):
            h_t, c_t = self.lstm1(output, (h_t, c_t))
            h_t2, c_t2 = self.lstm2(h_t, (h_t2, c_t2))
            output = self.linear(h_t2)
            outputs += [output]
        return torch.cat(outputs, dim=1)


if __name__ == "__main__":
    np.random.seed(2)
    torch.manual_seed(0)
    starts = np.random.randint(-40, 40, 11).reshape(11, 1)
    data = np.sin((np.arange(17) + starts) / 5.0).astype("float64")
    input = torch.from_numpy(data[3:, :-1])
    target = torch.from_numpy(data[3:, 1:])
    test_input = torch.from_numpy(data[:3, :-1])
    test_target = torch.from_numpy(data[:3, 1:])
    seq = Sequence()
    criterion = nn.MSELoss()
    optimizer = optim.LBFGS(seq.parameters(), lr=0.5, max_iter=4)
    for i in range(2):
        print("STEP: ", i)

        def closure():
            optimizer.zero_grad()
            out = seq(input)
            loss = criterion(out, target)
            print(f"loss: {loss.item():.10g}")
            loss.backward()
            return loss

        optimizer.step(closure)
        with torch.no_grad():
            future = 5
            pred = seq(test_input, future=future)
            loss = criterion(pred[:, :-future], test_target)
            print(f"test loss: {loss.item():.10g}")
            y = pred.detach().numpy()
            print(f"future {y[0, -1]:.9g} {np.abs(y).mean():.10g}")
    print(f"norms {sum(p.norm() for p in seq.parameters()):.10g}")
