// One sample: what is known of it, what was asked, and what it earned. The tokens are in tokens.js.
//
// A sample knows its pool: `{ prompts, messages, maskTruncated }`, the texts that it points to by number.

function completionText(item) {
  return item.pieces.length ? item.pieces.join('') : item.text || '';
}

function promptText(item) {
  const prompt = item.pool.prompts[item.prompt];
  return typeof prompt === 'string' ? prompt : prompt.map(({ content }) => content).join('\n');
}

// A reward as a bar between the lowest and the highest one.
function rewardMeter(reward, [low, high]) {
  const bar = make('i', {});
  bar.style.width = `${reward === null ? 0 : Math.round((100 * (reward - low)) / (high - low || 1))}%`;
  return make('span', { class: 'meter' }, make('span', { class: 'track' }, bar), make('span', { text: figure(reward) }));
}

const ENDS = { stop: 'ended by itself', length: 'cut off by length', abort: 'cut short' };

function sampleFacts(item) {
  const spans = isEpisode(item) ? versionCounts(item) : item.versions.map(([version, start, end]) => [version, end - start]);
  const versions = spans.map(([version, count]) => `v${minus(String(version))} (${count} tokens)`).join(', ');
  const told = [
    ...(item.outcome === 'trained' ? [] : [['outcome', item.reason ? `${item.outcome}: ${item.reason}` : item.outcome]]),
    ['reward', figure(item.reward), 'main'],
    ['advantage', signed(item.advantage, 3), item.advantage > 0 ? 'up' : item.advantage < 0 ? 'down' : ''],
    ...(isEpisode(item) ? episodeFacts(item) : [
      ['tokens', `${item.numTokens}`],
      ['prompt', item.numPromptTokens === null ? '–' : `${item.numPromptTokens} tokens`],
      ['end', ENDS[item.finish] || item.finish],
    ]),
    ['weights', versions || '–'],
    ['epoch', item.epoch ?? '–'],
    ['prompt id', item.promptId],
  ];
  return make('dl', { class: 'chips' }, ...told.map(([name, value, kind]) => make('div', { class: kind || '' }, make('dt', { text: name }), make('dd', { text: value }))));
}

function promptNode(item) {
  const prompt = item.pool.prompts[item.prompt];
  if (typeof prompt === 'string') return make('pre', { class: 'prompt', text: prompt });
  return make('div', { class: 'messages' }, ...prompt.map(({ role, content }) => make('div', { class: 'message' }, make('b', { text: role }), make('pre', { text: content }))));
}

function rewardTable(item) {
  const rows = Object.entries(item.parts).map(([name, value]) => {
    const failure = item.failures[name];
    return make('tr', { class: failure ? 'failed' : '' }, make('th', { scope: 'row', text: name }), make('td', { text: figure(value) }), make('td', { class: 'why', text: failure || '' }));
  });
  Object.entries(item.failures).filter(([name]) => !(name in item.parts)).forEach(([name, why]) => rows.push(make('tr', { class: 'failed' }, make('th', { scope: 'row', text: name }), make('td', { text: '–' }), make('td', { class: 'why', text: why }))));
  rows.push(make('tr', { class: 'sum' }, make('th', { scope: 'row', text: 'reward' }), make('td', { text: figure(item.reward) }), make('td', { class: 'why', text: rows.length && !isEpisode(item) ? 'the weighted sum' : '' })));
  return make('table', { class: 'parts' }, make('tbody', {}, ...rows));
}

// What was asked for, above the completion: nothing for an episode, whose turns have it.
function questionNodes(item) {
  return [
    ...(isEpisode(item) ? [] : [make('h4', { text: 'Prompt' }), promptNode(item)]),
    ...(item.answer === null ? [] : [make('h4', { text: 'Answer' }), make('pre', { class: 'answer', text: item.answer })]),
  ];
}

function earningNodes(item) {
  return [make('h4', { text: 'Rewards' }), rewardTable(item), isEpisode(item) ? statsTable(item) : ''];
}
