// Begins, and follows the address.

function start() {
  recallTheme();
  const shell = new Shell(document.getElementById('app'));
  const show = () => {
    const place = readPlace();
    if (place.run !== null && shell.view instanceof RunView && shell.view.id === place.run) {
      shell.view.turn(place);
      return;
    }
    if (place.page === 'compare' && shell.view instanceof CompareView && shell.view.turn(place)) return;
    const pages = { runs: RunsView, run: RunView, compare: CompareView };
    const trail = (text) => [link('/', { text: 'Runs' }), make('span', { text: '/', 'aria-hidden': 'true' }), make('b', { text })];
    const crumbs = { runs: [], run: trail(place.run), compare: trail('Compare') };
    shell.show(new pages[place.page](shell, place), crumbs[place.page]);
  };
  shell.again = () => {
    shell.view.id = null; // so that the same run is begun anew
    show();
  };
  addEventListener('popstate', show);
  show();
}

start();
