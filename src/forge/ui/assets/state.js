// How a run is doing, and how long ago.

const STATES = {
  running: 'running', starting: 'starting', finished: 'finished', stopped: 'stopped', failed: 'failed', unknown: 'unknown', empty: 'not begun',
};

function statePill(state) {
  const resumed = state.num_resumes ? ` · resumed${state.num_resumes > 1 ? ` ${state.num_resumes}×` : ''}` : '';
  return make(
    'span', { class: `pill ${state.kind}`, title: state.detail, 'data-test': 'state' },
    make('i', { 'aria-hidden': 'true' }), make('span', { text: `${STATES[state.kind] || state.kind}${resumed}` }),
  );
}

function ago(seconds) {
  if (seconds === null || seconds === undefined) return '–';
  const passed = Date.now() / 1000 - seconds;
  if (passed < 2) return 'now';
  if (passed < 60) return `${Math.round(passed)} s ago`;
  if (passed < 3600) return `${Math.floor(passed / 60)} min ago`;
  if (passed < 2 * 86400) return `${Math.floor(passed / 3600)} h ago`;
  if (passed < 60 * 86400) return `${Math.floor(passed / 86400)} days ago`;
  return moment(seconds).slice(0, 10);
}

// A text that says how long ago something was, and stays true.
function agoNode(seconds) {
  const node = make('time', { class: 'ago', text: ago(seconds) });
  node.since = seconds;
  if (seconds) node.title = moment(seconds);
  return node;
}

setInterval(() => document.querySelectorAll('time.ago').forEach((node) => { node.textContent = ago(node.since); }), 5000);

function stepText(step, total) {
  if (step === null) return 'no step yet';
  const known = step.toLocaleString('en-US');
  return total ? `step ${known} of ${total.toLocaleString('en-US')}` : `step ${known}`;
}

function tagList(tags) {
  return tags.length ? make('span', { class: 'tags' }, ...tags.map((tag) => make('span', { class: 'tag', text: tag }))) : null;
}
