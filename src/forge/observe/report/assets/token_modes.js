// What tokens can be coloured by. A mode has a value for each token, or the group that the token belongs to.

function difference(item, at) {
  return gap(item.trainer, item.sampler, at);
}

function gap(one, other, at) {
  const [mine, theirs] = [one?.[at] ?? null, other?.[at] ?? null];
  return mine === null || theirs === null ? null : mine - theirs;
}

function differences(item) {
  if (item.gaps === undefined) {
    const known = item.pieces.map((_, at) => difference(item, at)).filter((value) => value !== null);
    item.gaps = known.length
      ? { mean: known.reduce((sum, value) => sum + Math.abs(value), 0) / known.length, largest: known.reduce((most, value) => (Math.abs(value) > Math.abs(most) ? value : most), 0) }
      : null;
  }
  return item.gaps;
}

function versionAt(item, at) {
  const span = item.versions.find(([, start, end]) => at >= start && at < end);
  return span ? span[0] : null;
}

function turnAt(item, at) {
  return isEpisode(item) ? item.turns.find(({ start, end }) => at >= start && at < end) || null : null;
}

// A token's own advantage where it was recorded, else that of its turn, its agent or the whole sample.
function advantageAt(item, at) {
  if (item.advantages) return item.advantages[at] ?? null;
  const turn = turnAt(item, at);
  if (!turn) return item.advantage;
  return turn.advantage ?? (turn.agent && item.agents[turn.agent] ? item.agents[turn.agent].advantage : item.advantage);
}

// What the step did to a token: see gradient.js of the live page. Null where that is not known.
function learned(item, name, at) {
  return item.gradient?.tokens[name][at] ?? null;
}

const GROUPS_OF_BOUNDS = { low: 'lower bound acts', high: 'upper bound acts', dual: 'dual_clip acts', outside: 'outside, not clipped' };

const MODES = [
  { name: 'difference', label: 'trainer − sampler', ranges: [0.05, 0.2, 0.5, 1, 2], has: (item) => item.trainer && item.sampler, value: difference },
  { name: 'sampler', label: 'how unlikely it was', ranges: [2, 5, 10], isOneSided: true, has: (item) => item.sampler, value: (item, at) => item.sampler[at] },
  { name: 'advantage', label: 'advantage', ranges: [0.5, 1, 2, 5], unit: '', ends: ['worse', 'better'], has: (item) => item.advantage !== null && item.outcome === 'trained', value: advantageAt },
  { name: 'reference', label: 'policy − reference', ranges: [0.2, 1, 2, 5], has: (item) => item.reference && item.sampler, value: (item, at) => gap(item.trainer || item.sampler, item.reference, at) },
  { name: 'teacher', label: 'policy − teacher', ranges: [0.2, 1, 2, 5], has: (item) => item.teacher && item.sampler, value: (item, at) => gap(item.trainer || item.sampler, item.teacher, at) },
  { name: 'value', label: 'value by the critic', ranges: [0.5, 1, 2, 5], unit: '', ends: ['low', 'high'], has: (item) => item.values, value: (item, at) => item.values[at] },
  { name: 'gradient', label: 'gradient', ranges: [1, 0.3, 0.1, 0.03], unit: ' of the largest', ends: ['made less likely', 'made more likely'], has: (item) => largestGradient(item) > 0, value: (item, at) => push(item, at) },
  { name: 'ratio', label: 'ratio of the loss', ranges: [0.05, 0.2, 0.5], ends: ['below 1', 'above 1'], has: (item) => item.gradient?.tokens.ratio.some((value) => value !== null && value !== 1), value: (item, at) => logOf(learned(item, 'ratio', at)) },
  { name: 'bound', label: 'clipping', groups: GROUPS_OF_BOUNDS, has: (item) => item.gradient?.tokens.bound.some((bound) => bound), group: (item, at) => learned(item, 'bound', at) },
  { name: 'version', label: 'version of the weights', has: (item) => item.versions.length > 0, group: versionAt },
];

function logOf(value) {
  return value === null ? null : Math.log(value);
}

function largestGradient(item) {
  if (item.largest === undefined) item.largest = (item.gradient?.tokens.gradient || []).reduce((most, value) => Math.max(most, Math.abs(value ?? 0)), 0);
  return item.largest;
}

// How much descent moves a token's logprob, as a part of the token that it moves most.
function push(item, at) {
  const value = learned(item, 'gradient', at);
  return value === null ? null : -value / largestGradient(item);
}

// The groups of a mode that samples have, with a label and a tone for each.
function groupsOf(mode, items) {
  if (mode.groups) return Object.entries(mode.groups).filter(([name]) => items.some((item) => item.gradient?.tokens[mode.name].includes(name))).map(([name, label], place) => ({ name, label, tone: [1, 0, 6, 7][place] ?? 7 }));
  const versions = [...new Set(items.flatMap((item) => item.versions.map(([version]) => version)))].sort((one, other) => one - other);
  return versions.map((version, place) => ({ name: version, label: `v${minus(String(version))}`, tone: place % 8 }));
}
