"""PPO in one file: several environments, shuffled minibatches, clipping, a stop by divergence."""

import random

import numpy as np
import torch
from torch import nn, optim
from torch.distributions.categorical import Categorical

torch.set_default_dtype(torch.float64)
random.seed(1)
np.random.seed(1)
torch.manual_seed(1)
num_envs, num_steps, update_epochs, num_minibatches = 5, 10, 3, 4
gamma, gae_lambda, clip_coef, ent_coef, vf_coef, max_grad_norm, target_kl = (
    0.99,
    0.95,
    0.2,
    0.01,
    0.5,
    0.5,
    0.03,
)


class Envs:
    """Points on a line that want to stay near zero; ended ones begin anew."""

    def reset(self):
        self.state = np.random.uniform(-0.5, 0.5, (num_envs, 2))
        self.age = np.zeros(num_envs, dtype=int)
        return self.state.copy()

    def step(self, action):
        self.state[:, 1] += np.where(action == 1, 0.1, -0.1)
        self.state[:, 0] += self.state[:, 1]
        self.age += 1
        done = (np.abs(self.state[:, 0]) > 1.5) | (self.age >= 15)
        reward = 1 - np.abs(self.state[:, 0])
        fresh = np.random.uniform(-0.5, 0.5, (num_envs, 2))
        self.state[done], self.age[done] = fresh[done], 0
        return self.state.copy(), reward, done


def layer_init(layer, std=np.sqrt(2), bias_const=0.0):
    torch.nn.init.orthogonal_(layer.weight, std)
    torch.nn.init.constant_(layer.bias, bias_const)
    return layer


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(
            layer_init(nn.Linear(2, 16)), nn.Tanh(), layer_init(nn.Linear(16, 1), std=1.0)
        )
        self.actor = nn.Sequential(
            layer_init(nn.Linear(2, 16)), nn.Tanh(), layer_init(nn.Linear(16, 2), std=0.01)
        )

    def get_value(self, x):
        return self.critic(x)

    def get_action_and_value(self, x, action=None):
        probs = Categorical(logits=self.actor(x))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)


agent, envs = Agent(), Envs()
optimizer = optim.Adam(agent.parameters(), lr=2.5e-3, eps=1e-5)
obs = torch.zeros(num_steps, num_envs, 2)
actions, logprobs, rewards, dones, values = (torch.zeros(num_steps, num_envs) for _ in range(5))
batch_size = num_envs * num_steps
minibatch_size = batch_size // num_minibatches
next_obs, next_done = torch.Tensor(envs.reset()), torch.zeros(num_envs)
for iteration in range(1, 4):
    optimizer.param_groups[0]["lr"] = (1.0 - (iteration - 1.0) / 3) * 2.5e-3
    for step in range(num_steps):
        obs[step], dones[step] = next_obs, next_done
        with torch.no_grad():
            action, logprob, _, value = agent.get_action_and_value(next_obs)
            values[step] = value.flatten()
        actions[step], logprobs[step] = action, logprob
        found, reward, done = envs.step(action.cpu().numpy())
        rewards[step] = torch.tensor(reward).view(-1)
        next_obs, next_done = torch.Tensor(found), torch.Tensor(done.astype(np.float64))
    with torch.no_grad():
        next_value = agent.get_value(next_obs).reshape(1, -1)
        advantages, lastgaelam = torch.zeros_like(rewards), 0
        for t in reversed(range(num_steps)):
            last = t == num_steps - 1
            nextnonterminal = 1.0 - (next_done if last else dones[t + 1])
            nextvalues = next_value if last else values[t + 1]
            delta = rewards[t] + gamma * nextvalues * nextnonterminal - values[t]
            advantages[t] = lastgaelam = delta + gamma * gae_lambda * nextnonterminal * lastgaelam
        returns = advantages + values
    b_obs, b_logprobs, b_actions = obs.reshape((-1, 2)), logprobs.reshape(-1), actions.reshape(-1)
    b_advantages, b_returns, b_values = advantages.reshape(-1), returns.reshape(-1), values.reshape(-1)
    b_inds, clipfracs = np.arange(batch_size), []
    for epoch in range(update_epochs):
        np.random.shuffle(b_inds)
        for start in range(0, batch_size, minibatch_size):
            mb_inds = b_inds[start : start + minibatch_size]
            _, newlogprob, entropy, newvalue = agent.get_action_and_value(
                b_obs[mb_inds], b_actions.long()[mb_inds]
            )
            logratio = newlogprob - b_logprobs[mb_inds]
            ratio = logratio.exp()
            with torch.no_grad():
                approx_kl = ((ratio - 1) - logratio).mean()
                clipfracs += [((ratio - 1.0).abs() > clip_coef).double().mean().item()]
            mb_advantages = b_advantages[mb_inds]
            if len(mb_inds) > 1:
                mb_advantages = (mb_advantages - mb_advantages.mean()) / (mb_advantages.std() + 1e-8)
            pg_loss1 = -mb_advantages * ratio
            pg_loss2 = -mb_advantages * torch.clamp(ratio, 1 - clip_coef, 1 + clip_coef)
            pg_loss = torch.max(pg_loss1, pg_loss2).mean()
            newvalue = newvalue.view(-1)
            v_clipped = b_values[mb_inds] + torch.clamp(newvalue - b_values[mb_inds], -clip_coef, clip_coef)
            v_loss_unclipped = (newvalue - b_returns[mb_inds]) ** 2
            v_loss = 0.5 * torch.max(v_loss_unclipped, (v_clipped - b_returns[mb_inds]) ** 2).mean()
            loss = pg_loss - ent_coef * entropy.mean() + v_loss * vf_coef
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), max_grad_norm)
            optimizer.step()
        if approx_kl > target_kl:
            print(f"stopped after {epoch}")
            break
    y_pred, y_true = b_values.cpu().numpy(), b_returns.cpu().numpy()
    explained_var = 1 - np.var(y_true - y_pred) / np.var(y_true)
    print(
        f"{iteration}: value {v_loss.item():.10g} policy {pg_loss.item():.10g} kl {approx_kl.item():.9g} "
        f"clipped {np.mean(clipfracs):.10g} explained {explained_var:.10g} reward {rewards.sum().item():.10g}"
    )
print(f"norms {sum(p.norm() for p in agent.parameters()):.10g}")
