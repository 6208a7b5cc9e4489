// Episodes of several turns: what the policy read, what it sampled, which tools it called, and what each turn earned.

const BREAKS = {
  template: 'the chat template renders the earlier messages differently now',
  retokenization: 'the new tokens cannot be joined to the sampled ones',
  client_edit: 'the client sent another history than it was given',
  compaction: 'the program replaced its history',
};

const ENDINGS = {
  finished: 'finished', truncated: 'truncated by the environment', turn_limit: 'turn limit', token_limit: 'token limit', context_full: 'context full',
  tool_call_limit: 'tool call limit', time_limit: 'time limit',
};

const STATS = [
  ['num_turns', 'turns'], ['num_sampled', 'tokens sampled'], ['num_observed', 'tokens read'], ['num_tool_calls', 'tool calls'],
  ['num_tool_errors', 'tool errors'], ['num_prefix_breaks', 'prefix breaks'], ['num_undelivered', 'undelivered'],
  ['seconds', 'seconds'], ['tools_s', 'seconds in tools'],
];

function isEpisode(item) {
  return Array.isArray(item.turns);
}

function turnMessages(item, turn) {
  return turn.messages.map((number) => item.pool.messages[number]);
}

// What was said and read in all turns, for the search.
function conversationText(item) {
  return item.turns.flatMap((turn) => [...turnMessages(item, turn).map(({ content }) => content), turn.context || '', turn.text || '']).join('\n');
}

function versionsOf(item, turn) {
  return [...new Set(item.versions.filter(([, start, end]) => start < turn.end && end > turn.start).map(([version]) => version))];
}

// What answered for the agent of a turn, and what it earned.
function agentOf(item, turn) {
  return item.agents[turn.agent] || { policy: 'live', learns: true, reward: null, advantage: null };
}

// Turns as they were said: by agent in the record, because agents may speak at the same time.
function inOrder(item) {
  return [...item.turns].sort((one, other) => (one.order ?? one.index) - (other.order ?? other.index));
}

// Why a turn's sampled tokens are not in the loss; null where they are.
function leftOut(item, turn) {
  if (!turn.delivered) return 'never delivered';
  if (turn.agent && !agentOf(item, turn).learns) return `${turn.agent} does not learn`;
  if (!turn.trained) return 'left out of training by the program';
  if (item.outcome === 'evaluation') return 'held out';
  if (item.outcome !== 'trained') return 'its group was not trained on';
  const last = item.turns.filter(({ delivered }) => delivered).pop();
  const isCut = item.ending !== 'finished' || (last && last.finish === 'length');
  return item.pool.maskTruncated && isCut ? 'the episode was cut off' : null;
}

function maskOf(item, turn) {
  const why = leftOut(item, turn);
  if (turn.agent && agentOf(item, turn).policy !== 'live') return `not in the loss: ${why}`;
  return `${turn.end - turn.start} tokens sampled, ${why === null ? 'in the loss' : `not in the loss: ${why}`}`;
}

// How many tokens each version of the weights sampled.
function versionCounts(item) {
  const counts = new Map();
  item.versions.forEach(([version, start, end]) => counts.set(version, (counts.get(version) || 0) + end - start));
  return [...counts];
}

class Conversation {
  // `text(item, from, to)` makes the coloured tokens of a span.
  constructor(item, text) {
    this.item = item;
    this.text = text;
    this.children = new Map();
    item.turns.forEach(({ parent }) => this.children.set(parent, (this.children.get(parent) || 0) + 1));
    this.node = make('div', { class: 'turns', 'data-test': 'turns' }, ...inOrder(item).map((turn) => this.turn(turn)));
    const left = item.numTurns - item.turns.length;
    if (left > 0) this.node.append(make('p', { class: 'help', text: `${left} more turns are not in this page.` }));
  }

  turn(turn) {
    const isCounted = leftOut(this.item, turn) === null;
    const node = make(
      'section', { class: `turn depth${Math.min(6, turn.path.length)}${turn.delivered ? '' : ' lost'}` },
      this.head(turn),
      ...this.joint(turn),
      ...turnMessages(this.item, turn).map((message) => this.message(message)),
      make(
        'div', { class: `said${isCounted ? ' counted' : ''}` },
        make('div', { class: 'who' }, make('b', { text: turn.agent || 'assistant' }), make('small', { text: maskOf(this.item, turn) })),
        this.text(this.item, turn),
        ...turn.calls.map((call) => this.call(call)),
      ),
    );
    return node;
  }

  head(turn) {
    const versions = versionsOf(this.item, turn).map((version) => `v${minus(String(version))}`).join(', ');
    const told = [
      ['reward', turn.reward === null ? null : figure(turn.reward), 'main'],
      ['advantage', turn.advantage === null ? null : signed(turn.advantage, 3), turn.advantage > 0 ? 'up' : turn.advantage < 0 ? 'down' : ''],
      ['weights', versions || (turn.agent ? agentOf(this.item, turn).policy : null)],
      ['read', turn.read === null ? null : `${turn.read} tokens`],
      ['cached', turn.cached ? `${turn.cached} tokens` : null],
      ['time', turn.seconds === null ? null : `${figure(turn.seconds)} s`],
      ['end', turn.finish === 'length' ? 'cut off by length' : null],
    ].filter(([, value]) => value !== null);
    const branch = turn.path.length ? ` · branch ${turn.path.join('.')}` : '';
    return make(
      'header', {}, make('h5', { text: `Turn ${turn.index + 1}${turn.agent ? ` · ${turn.agent}` : ''}${branch}` }),
      make('dl', { class: 'marks' }, ...told.map(([name, value, kind]) => make('div', { class: kind || '' }, make('dt', { text: name }), make('dd', { text: value })))),
    );
  }

  // How a turn is joined to the one before it, where that is not simply what the reader sees above it.
  joint(turn) {
    const notes = [];
    if (turn.break !== null) notes.push(make('p', { class: 'note', text: `Prefix break (${turn.break}): ${BREAKS[turn.break] || 'the history was not extended'}. A new root starts here.` }));
    else if (turn.parent === null && turn.index > 0) notes.push(make('p', { class: 'note', text: 'A conversation of its own starts here.' }));
    else if (turn.parent !== null && (turn.parent !== turn.index - 1 || this.children.get(turn.parent) > 1)) {
      notes.push(make('p', { class: 'note', text: `Continues turn ${turn.parent + 1}${this.children.get(turn.parent) > 1 ? `, one of ${this.children.get(turn.parent)} branches` : ''}.` }));
    }
    if (!turn.delivered) notes.push(make('p', { class: 'note bad', text: 'This answer never reached its client. It is not trained on.' }));
    if (turn.context !== null) notes.push(make('details', { class: 'context' }, make('summary', { text: `All that the policy read here (${turn.read ?? '?'} tokens)` }), make('pre', { text: turn.context })));
    return notes;
  }

  message({ role, content, name, call, calls }) {
    const from = [name, call].filter((word) => word).join(' · ');
    return make(
      'div', { class: `heard role-${['system', 'user', 'tool', 'assistant'].includes(role) ? role : 'other'}` },
      make('div', { class: 'who' }, make('b', { text: role }), from ? make('span', { text: from }) : null, make('small', { text: 'read, not in the loss' })),
      make('pre', { text: content }),
      calls ? make('pre', { class: 'arguments', text: calls }) : null,
    );
  }

  call({ id, name, arguments: given, malformed }) {
    if (malformed !== undefined) {
      return make('div', { class: 'call bad' }, make('b', { text: 'malformed call' }), make('span', { text: id }), make('pre', { text: malformed }));
    }
    return make('div', { class: 'call' }, make('b', { text: `calls ${name}` }), make('span', { text: id }), make('pre', { class: 'arguments', text: given }));
  }
}

// How an episode ended and what it used.
function episodeFacts(item) {
  const known = STATS.filter(([key]) => item.stats[key] !== undefined && (item.stats[key] || key === 'num_turns'));
  const agents = Object.entries(item.agents).map(([name, { reward }]) => [name, reward === null ? 'no reward' : figure(reward)]);
  return [['ending', ENDINGS[item.ending] || item.ending, item.ending === 'finished' ? '' : 'down'], ...agents, ...known.map(([key, label]) => [label, figure(item.stats[key])])];
}

function statsTable(item) {
  const rows = Object.entries(item.stats).map(([name, value]) => make('tr', {}, make('th', { scope: 'row', text: name }), make('td', { text: figure(value) })));
  return make('details', { class: 'stats' }, make('summary', { text: 'All numbers of this episode' }), make('table', { class: 'parts' }, make('tbody', {}, ...rows)));
}
