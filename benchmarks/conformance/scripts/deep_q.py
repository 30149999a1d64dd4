"""Deep Q-learning: a replay memory of transitions, a target network, masks of final states."""

import math
import random
from collections import deque, namedtuple
from itertools import count

import torch
from torch import nn, optim
from torch.nn import functional as F

torch.set_default_dtype(torch.float64)
random.seed(1)
torch.manual_seed(1)
Transition = namedtuple("Transition", ("state", "action", "next_state", "reward"))


class Corridor:
    """A cart on a line that is pushed left or right, and ends off the line or after 30 pushes."""

    def reset(self):
        self.place, self.speed, self.steps = random.uniform(-0.5, 0.5), 0.0, 0
        return [self.place, self.speed]

    def step(self, action):
        self.speed += 0.2 if action == 1 else -0.2
        self.place += self.speed
        self.steps += 1
        return [self.place, self.speed], 1.0 - abs(self.place), abs(self.place) > 1, self.steps >= 30


class ReplayMemory:
    def __init__(self, capacity):
        self.memory = deque(maxlen=capacity)

    def push(self, *args):
        self.memory.append(Transition(*args))

    def sample(self, batch_size):
        return random.sample(self.memory, batch_size)

    def __len__(self):
        return len(self.memory)


class DQN(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer1, self.layer2, self.layer3 = nn.Linear(2, 16), nn.Linear(16, 16), nn.Linear(16, 2)

    def forward(self, x):
        return self.layer3(F.relu(self.layer2(F.relu(self.layer1(x)))))


BATCH_SIZE, GAMMA, TAU = 13, 0.99, 0.05
policy_net, target_net = DQN(), DQN()
target_net.load_state_dict(policy_net.state_dict())
optimizer = optim.AdamW(policy_net.parameters(), lr=1e-3, amsgrad=True)
memory, env = ReplayMemory(200), Corridor()
steps_done, losses = 0, []


def select_action(state):
    global steps_done
    eps_threshold = 0.05 + 0.85 * math.exp(-1.0 * steps_done / 50)
    steps_done += 1
    if random.random() > eps_threshold:
        with torch.no_grad():
            return policy_net(state).max(1).indices.view(1, 1)
    return torch.tensor([[random.randrange(2)]], dtype=torch.long)


def optimize_model():
    if len(memory) < BATCH_SIZE:
        return
    batch = Transition(*zip(*memory.sample(BATCH_SIZE), strict=True))
    non_final_mask = torch.tensor(tuple(s is not None for s in batch.next_state), dtype=torch.bool)
    non_final_next_states = torch.cat([s for s in batch.next_state if s is not None])
    state_batch, action_batch = torch.cat(batch.state), torch.cat(batch.action)
    reward_batch = torch.cat(batch.reward)
    state_action_values = policy_net(state_batch).gather(1, action_batch)
    next_state_values = torch.zeros(BATCH_SIZE)
    with torch.no_grad():
        next_state_values[non_final_mask] = target_net(non_final_next_states).max(1).values
    expected = (next_state_values * GAMMA) + reward_batch
    loss = nn.SmoothL1Loss()(state_action_values, expected.unsqueeze(1))
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_value_(policy_net.parameters(), 100)
    optimizer.step()
    losses.append(loss.item())


for i_episode in range(8):
    state = torch.tensor(env.reset()).unsqueeze(0)
    total = 0.0
    for t in count():
        action = select_action(state)
        observation, reward, terminated, truncated = env.step(action.item())
        total += reward
        next_state = None if terminated else torch.tensor(observation).unsqueeze(0)
        memory.push(state, action, next_state, torch.tensor([reward]))
        state = next_state
        optimize_model()
        target_dict, policy_dict = target_net.state_dict(), policy_net.state_dict()
        for key in policy_dict:
            target_dict[key] = policy_dict[key] * TAU + target_dict[key] * (1 - TAU)
        target_net.load_state_dict(target_dict)
        if terminated or truncated:
            print(f"episode {i_episode}: {t + 1} steps, return {total:.10g}, losses {sum(losses):.10g}")
            break
print(f"norms {sum(p.norm() for m in (policy_net, target_net) for p in m.parameters()):.10g}")
