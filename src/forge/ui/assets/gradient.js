// What a step did to a token, and why: the advantage, the ratio, the bounds, the correction, the penalty, the weight.

const AVERAGES = {
  token_mean: 'the mean over the tokens of the step that are in the loss', sequence_mean: 'the mean over completions of the mean over their tokens',
  constant: 'the sum over tokens, divided by completions × the fixed length',
};

// A number with its sign, exact enough to be looked up.
function exact(value) {
  if (value === null || value === undefined) return '–';
  return (value > 0 ? '+' : '') + minus(String(Number(value.toPrecision(5))));
}

function advantageText(item, from, value) {
  if (!from || item.turns || from.value === null) return 'how much better than expected it was';
  if (from.std === 0) return 'all rewards of its group are equal';
  const baseline = from.baseline === null ? figure(from.reward) : `${figure(from.reward)} − ${figure(from.baseline)}, the mean of its group`;
  const scaled = from.std === null ? baseline : `(${baseline}) ÷ (${figure(from.std)} + ${figure(from.epsilon)}), the group’s deviation`;
  return Math.abs(from.value - value) < 1e-3 * Math.max(1, Math.abs(value)) ? scaled : 'how much better than expected it was';
}

function ratioText(item, rule, at) {
  if (rule.kind === 'reinforce') return 'not used by this loss';
  const whole = rule.kind === 'gspo' ? ', the mean over the whole completion' : '';
  if (rule.proximal === 'trainer') return `trainer / trainer before the step: 1 at its first update${whole}`;
  const [trainer, sampler] = [item.trainer?.[at] ?? null, item.sampler?.[at] ?? null];
  const own = trainer === null || sampler === null ? '' : `exp(${minus(trainer.toFixed(3))} − (${minus(sampler.toFixed(3))}))`;
  return rule.kind === 'gspo' ? `trainer / sampler${whole}${own ? `; of this token alone ${own}` : ''}` : `trainer / sampler, ${own}`;
}

function boundText(rule, bound, advantage) {
  const high = rule.high === null ? '∞' : figure(rule.high);
  const side = advantage > 0 ? 'positive' : 'negative';
  if (rule.kind === 'reinforce' || rule.kind === 'sapo') return ['none', rule.kind === 'sapo' ? 'the gradient fades with the distance of the ratio from 1' : 'this loss has no bounds'];
  if (rule.kind === 'cispo') {
    const told = { low: `the weight is raised to ${figure(rule.low)}; the gradient stays`, high: `the weight is cut to ${high}; the gradient stays` };
    return [bound ? 'weight bounded' : 'inside', told[bound] || `between ${figure(rule.low)} and ${high}`];
  }
  const told = {
    low: ['clipped below', `the ratio is below ${figure(rule.low)} (clip_low) and the advantage negative: it has fallen enough, so no gradient`],
    high: ['clipped above', `the ratio is above ${high} (clip_high) and the advantage positive: it has risen enough, so no gradient`],
    dual: ['clipped by dual_clip', `the ratio is above ${figure(rule.dual)} and the advantage negative: the loss is at its limit, so no gradient`],
    outside: ['not clipped', `the ratio is outside ${figure(rule.low)} to ${high}, but with a ${side} advantage the gradient leads back and is kept`],
  };
  return told[bound] || ['inside', `between ${figure(rule.low)} and ${high}`];
}

function correctionText({ correction, kind, proximal }, value) {
  if (correction.kind === 'none') return null;
  const level = correction.level === 'sequence' ? 'the completion’s' : 'the token’s';
  const bounds = `${figure(correction.low)} and ${correction.high === null || correction.high === 'Infinity' ? '∞' : figure(Number(correction.high))}`;
  if (value === 0) return `${level} ratio trainer / sampler is outside ${bounds}: masked`;
  if (correction.kind === 'mask') return `${level} ratio trainer / sampler is between ${bounds}${proximal === 'sampler' && kind !== 'reinforce' ? '; it is in the loss already' : ''}`;
  return `${level} ratio trainer / sampler, kept between ${bounds}`;
}

function lessonRows(item, gradient, from, at) {
  const { rule, tokens } = gradient;
  const value = (name) => tokens[name][at] ?? null;
  const [advantage, pull, penalty, weight, total] = ['advantage', 'pull', 'penalty', 'weight', 'gradient'].map(value);
  const [clip, why] = boundText(rule, value('bound'), advantage);
  const corrected = correctionText(rule, value('correction'));
  const masked = rule.correction.sequence_mask && sequenceOf(item, gradient, at)?.isMasked;
  const effect = !total ? 'this token is left as it is' : total < 0 ? 'descent makes this token more likely' : 'descent makes this token less likely';
  return [
    ['advantage A', exact(advantage), advantageText(item, from, advantage)],
    ['ratio r', value('ratio') === null ? '–' : figure(value('ratio')), ratioText(item, rule, at)],
    ['clipping', clip, why],
    ...(corrected ? [['correction', figure(value('correction')), corrected]] : []),
    ...(masked ? [['sequence mask', 'left out', 'sampler and trainer disagree on the completion as a whole']] : []),
    ['policy term', exact(pull), 'derivative of the policy’s loss by the logprob, after clipping and correction'],
    ...(rule.kl ? [['KL term', exact(penalty), `${figure(rule.kl.coefficient)} × derivative of ${rule.kl.estimator} from the reference`]] : []),
    ['weight', weight === null ? '–' : weight === 0 ? '0' : `1 / ${figure(1 / weight)}`, weight === null ? 'how many tokens the step had is not recorded' : weight === 0 ? 'cut off, so left out (rollout.mask_truncated)' : AVERAGES[rule.average]],
    [weight === null ? 'gradient before the weight' : 'gradient', exact(total), effect, 'sum'],
  ];
}

// The sequence of the loss that a token belongs to: that of its agent, or the only one.
function sequenceOf(item, gradient, at) {
  const turn = turnAt(item, at);
  return gradient.sequences.find(({ agent }) => !agent || agent === turn?.agent) || null;
}

class GradientPanel {
  constructor() {
    this.node = make('section', { class: 'lesson', 'aria-label': 'What the step did to a token', 'aria-live': 'polite', 'data-test': 'lesson' });
  }

  // Shows what is known of a sample, before a token is chosen.
  show(item, gradient, from) {
    Object.assign(this, { item, gradient, from });
    const { none, unknown, notes, sequences } = gradient;
    this.node.classList.remove('picked');
    this.node.replaceChildren(
      make('h4', { text: 'What the step did to its tokens' }),
      ...(none ? [make('p', { class: 'help', text: `Nothing: ${none}.` })] : unknown ? [make('p', { class: 'help', text: unknown })] : [
        ...sequences.map((sequence) => this.summary(sequence)),
        make('p', { class: 'help', text: 'Choose a token, with the pointer or with the arrow keys, to see how its gradient comes about.' }),
      ]),
      ...notes.map((text) => make('p', { class: 'help', text })),
    );
  }

  summary({ agent, numTokens, isLeftOut, isMasked, bounds, flat, size, sum, weight }) {
    const cut = [['high', 'clipped above'], ['low', 'clipped below'], ['dual', 'by dual_clip'], ['outside', 'outside, kept']].filter(([name]) => bounds[name]).map(([name, label]) => `${bounds[name].toLocaleString('en-US')} ${label}`);
    const told = [
      ['tokens in the loss', isLeftOut ? '0, cut off' : numTokens.toLocaleString('en-US')],
      ...(isMasked ? [['sequence mask', 'left out']] : []),
      ['bounds', cut.join(', ') || 'none acts'],
      ['without gradient', `${((100 * flat) / (numTokens || 1)).toFixed(flat && flat < numTokens ? 1 : 0)}%`],
      [weight === null ? 'Σ |gradient|, unweighted' : 'Σ |gradient|', figure(size)],
      ['descent makes it', sum < 0 ? 'more likely' : sum > 0 ? 'less likely' : 'no different'],
    ];
    return make('dl', { class: 'marks' }, ...(agent ? [make('div', {}, make('dt', { text: 'agent' }), make('dd', { text: agent }))] : []), ...told.map(([name, value]) => make('div', {}, make('dt', { text: name }), make('dd', { text: value }))));
  }

  // Shows how the gradient of a token comes about. Returns whether there is something to show.
  pick(item, at) {
    const { gradient } = item;
    if (!gradient || gradient.none || gradient.unknown) return false;
    this.node.classList.add('picked');
    const isKnown = (gradient.tokens.ratio[at] ?? null) !== null && (gradient.tokens.gradient[at] ?? null) !== null;
    const from = item === this.item ? this.from : null;
    const rows = isKnown ? lessonRows(item, gradient, from, at) : [];
    this.node.replaceChildren(
      make('h4', {}, `${item === this.item ? '' : `Sample ${item.index}, `}token ${at + 1}: `, make('code', { text: JSON.stringify(item.pieces[at] || '') })),
      isKnown
        ? make('table', { class: 'parts' }, make('tbody', {}, ...rows.map(([name, value, why, kind]) => make('tr', { class: kind || '' }, make('th', { scope: 'row', text: name }), make('td', { text: value }), make('td', { class: 'why', text: why })))))
        : make('p', { class: 'help', text: 'It is not in the loss, or one of its logprobs is not finite.' }),
      this.back(),
    );
    return true;
  }

  back() {
    return make('button', { type: 'button', class: 'switch', text: 'all tokens', on: { click: () => { document.querySelectorAll('.token.picked').forEach((node) => node.classList.remove('picked')); this.show(this.item, this.gradient, this.from); } } });
  }
}
