// What happened to a run: changes while it ran, crashes and restarts, workers that were restored.

function happened(description, table) {
  const found = [
    ...description.changes.map((change) => ({ time: Date.parse(change.time) / 1000, kind: 'changed', text: `${change.key}: ${JSON.stringify(change.before)} → ${JSON.stringify(change.after)}`, where: `after step ${change.step}`, by: change.by })),
    ...description.events.map((event) => supervisorEvent(event)),
    ...recoveries(table),
  ];
  return found.sort((one, other) => (other.time || 0) - (one.time || 0));
}

function supervisorEvent(event) {
  const time = Date.parse(event.time) / 1000;
  const status = event.status < 0 ? `signal ${-event.status}` : `exit code ${event.status}`;
  const where = event.step === null || event.step === undefined ? '' : `after step ${event.step}`;
  if (event.event === 'crash') {
    const text = `crashed with ${status}; ${event.action === 'restart' ? 'started again' : 'not started again'}`;
    return { time, kind: 'crash', text, where, more: Array.isArray(event.tail) ? event.tail.join('\n') : '' };
  }
  if (event.event === 'damaged') return { time, kind: 'crash', text: `a damaged checkpoint was set aside: ${event.checkpoint}`, where };
  return { time, kind: 'end', text: event.event === 'end' ? `ended with ${status}` : String(event.event), where };
}

function recoveries(table) {
  const restarts = table.columns['recovery/restarts'] || [];
  return restarts.flatMap((count, row) => {
    if (!count) return [];
    const again = (table.columns['recovery/steps_retrained'] || [])[row];
    const seconds = (table.columns['recovery/seconds'] || [])[row];
    const told = [`${figure(count)} ${count === 1 ? 'worker' : 'workers'} restored`, again ? `${figure(again)} steps trained again` : '', seconds ? span(seconds) : ''];
    return [{ time: table.times[row], kind: 'recovery', text: told.filter((word) => word).join(', '), where: `before step ${table.steps[row]}` }];
  });
}

const HAPPENED = { changed: 'change', crash: 'crash', end: 'end', recovery: 'recovery' };

class EventsView {
  constructor(run) {
    this.run = run;
    this.node = make('div', {});
    this.refresh();
  }

  refresh() {
    this.node.replaceChildren(eventList(this.run.description, this.run.table));
  }
}

function eventList(description, table) {
  const found = happened(description, table);
  if (!found.length) return make('p', { class: 'card help', 'data-test': 'events', text: 'Nothing out of the ordinary: no change while it ran, no crash, no restart.' });
  return make('ol', { class: 'card happened', 'data-test': 'events' }, ...found.map(({ time, kind, text, where, by, more }) => make(
    'li', { class: kind },
    make('span', { class: 'sort', text: HAPPENED[kind] }),
    make('div', {}, make('b', { text }), make('small', { text: [where, by ? `by ${by}` : '', time ? moment(time) : ''].filter((word) => word).join(' · ') }), more ? make('details', {}, make('summary', { text: 'last lines of its standard error' }), make('pre', { text: more })) : null),
  )));
}
