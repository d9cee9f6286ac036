import type { GlossaryEntry } from '$lib/api/types';

/** The metric glossary of `crates/core/src/glossary.rs` in Chinese, by metric name. */
export const CHINESE: Record<string, Omit<GlossaryEntry, 'name' | 'unit'> & { unit?: string }> = {
  reward_mean: {
    title: '奖励',
    explanation: '本次更新中回答的平均奖励，从 −1（踩）到 1（赞）。',
    normal: '模型学会你的喜好时，会逐次训练上升。',
  },
  policy_loss: {
    title: '策略损失',
    explanation: '截断策略梯度损失：按奖励加权的回答概率变化。',
    normal: '起初接近 0，随后略为负；单看大小意义不大。',
  },
  preference_loss: {
    title: '偏好损失',
    explanation: '偏好回答与被拒回答（即你的改正）成对的损失，含偏好回答的似然。',
    normal: '在一次训练内下降。持平表示没有学会改正。',
  },
  preference_margin: {
    title: '偏好差距',
    explanation: '相对基础模型，模型向偏好回答移动得比向被拒回答多多少。',
    normal: '从接近 0 开始增大。',
  },
  kto_loss: {
    title: 'KTO 损失',
    explanation: '无法做重要性加权的赞与踩回答的损失。',
    normal: '从 0.5 开始下降。',
  },
  value_loss: {
    title: '价值损失',
    explanation: '评论器对未来奖励预测的平方误差。',
    normal: '经过数次训练逐渐下降。',
  },
  explained_variance: {
    title: '解释方差',
    explanation: '评论器能预测的奖励变化占比。低于 0.1 时不采用它的意见。',
    normal: '从 0 向 1 上升。为负表示评论器不如直接猜平均值。',
  },
  advantage_mean: {
    title: '优势',
    explanation: '回答平均比预期好多少。',
    normal: '接近 0。明显为负表示多数回答令人失望。',
  },
  advantage_std: {
    title: '优势离散度',
    explanation: '优势的标准差。为 0 时无从区分回答好坏。',
    normal: '0.3 至 1.5。',
  },
  baseline: {
    title: '基线',
    explanation: '奖励的滑动平均，新的奖励与它比较。',
    normal: '随点赞比例变化，在 −1 与 1 之间。',
  },
  kl_to_base: {
    title: '与基础模型的 KL',
    unit: '奈特/词元',
    explanation: '训练后的回答偏离无适配器模型的程度（k3 估计）。',
    normal: '低于本次训练的目标值。突然上升之后往往出现重复或混乱的文字。',
  },
  approx_kl: {
    title: '本次更新的 KL',
    unit: '奈特/词元',
    explanation: '本次训练离起点有多远。',
    normal: '策略梯度每次训练在 0 与 0.05 之间。',
  },
  clip_fraction: {
    title: '截断比例',
    explanation: '变化过大而被截断的词元占比。',
    normal: '第一步为 0，之后低于 0.3。更高表示学习率过大。',
  },
  ratio: {
    title: '概率比',
    explanation: '新旧模型在回答词元上的平均概率比。',
    normal: '在 1.0 附近浮动。',
  },
  change_kept: {
    title: '保留的改动',
    explanation: '本课改动中被保留的比例；其余部分因损害通用能力而被收回。',
    normal: '1.0。更低表示本课的改动被缩小了。',
  },
  importance_weight: {
    title: '重要性权重',
    explanation: '对作答模型与被训练模型之差的平均修正。',
    normal: '在 1.0 附近。更低表示回答来自过旧或被截断的分布。',
  },
  logprob_gap: {
    title: '服务与训练之差',
    unit: '奈特/词元',
    explanation: '作答时记录的对数概率与训练时重算值的平均绝对差，只计由被训练适配器作答的部分。',
    normal: 'CPU 上低于 0.001，GPU 上低于 0.005。top-p 小于 1 的采样会增加一个常数。',
  },
  entropy: {
    title: '熵',
    unit: '奈特/词元',
    explanation: '回答自身词元的平均意外程度，估计模型还有多少变化。',
    normal: '0.3 至 2。趋向 0 表示某一种回答占了上风。',
  },
  gradient_norm: {
    title: '梯度范数',
    explanation: '截到上限之前的梯度长度。',
    normal: '0.1 至 10。为 0 表示什么也没学到；尖峰说明有异常样本。',
  },
  learning_rate: {
    title: '学习率',
    explanation: '优化器在这一步的步长。',
    normal: '先用几步升高，之后保持或下降。',
  },
  response_length: {
    title: '回答长度',
    unit: '词元',
    explanation: '本次更新中回答的平均长度。',
    normal: '由你决定；未要求的持续偏移是警告。',
  },
  liked_change: {
    title: '获赞的回答',
    unit: '奈特/词元',
    explanation: '本次训练中获赞回答（及你的改正）平均对数概率的变化。',
    normal: '大于 0。',
  },
  disliked_change: {
    title: '被踩的回答',
    unit: '奈特/词元',
    explanation: '本次训练中被踩回答平均对数概率的变化。',
    normal: '小于获赞回答的变化，通常小于 0。',
  },
  samples_used: {
    title: '使用的回答',
    unit: '条',
    explanation: '参与本次训练的回答。',
    normal: '除未采用者外的全部。',
  },
  samples_dropped: {
    title: '未采用的回答',
    unit: '条',
    explanation: '查看后未采用的回答；每条都有原因。',
    normal: '0 至数条。',
  },
  pairs_used: {
    title: '使用的改正',
    unit: '对',
    explanation: '本次训练中偏好回答与被拒回答的对数。',
    normal: '每个改正一对；回答曾重试时更多。',
  },
  tokens_per_second: {
    title: '训练速度',
    unit: '词元/秒',
    explanation: '每秒完成前向与反向的词元数。',
    normal: '取决于机器；同时有请求时会下降。',
  },
  peak_memory: {
    title: '内存峰值',
    explanation: '训练进程迄今占用的最大内存。',
    normal: '接近训练前的估计。',
  },
};
